"""Write the tables of the reference that are made from the code and from the result pages.

    python tools/reference_tables.py

A page has `<!-- table: NAME -->` before a table; tests/unit/test_site.py holds the pages to this tool.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer import errors
from specinfer.kernels.machine import LEVELS, Level
from specinfer.report.provenance import WIDE
from specinfer.serve.observe.metrics import Metrics
from specinfer.support import REFUSED, Feature

DOCS = Path(__file__).resolve().parents[1] / "docs"
BENCHMARKS = DOCS.parent / "benchmarks"
IMPLIED = {  # features that another one has, too
    Feature.GPU: [Feature.TORCH],
    Feature.TENSOR: [Feature.RANKS],
    Feature.PIPELINE: [Feature.RANKS],
    Feature.GGUF: [Feature.QUANTIZED],
    Feature.STREAMED: [Feature.OFFLOAD],
    Feature.ONLY_HEADS: [Feature.HEAD],
    Feature.DRAFT_GGUF: [Feature.DRAFT_QUANTIZED],
}
_HARDWARE = re.compile(r"^- hardware: (.+? \(family \d+\)),? (.+?), \d+ cores", re.M)  # the CPU; its features


def metrics_table() -> str:
    """The series of /metrics: name, kind, labels besides model_name, purpose."""
    rows = ["| series | kind | labels | meaning |", "|---|---|---|---|"]
    rows += ["| `{}` | {} | {} | {} |".format(*one) for one in sorted(series(Metrics("model")))]
    return "\n".join(rows)


def series(metrics: Metrics) -> list[tuple[str, str, str, str]]:
    """Name, kind, labels and purpose of each series in the registry."""
    found = []
    for collector in set(metrics.registry._collector_to_names):  # the library has no public list
        [described] = collector.describe()
        name = described.name + ("_total" if described.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames if label != "model_name")
        found.append((name, described.type, labels, described.documentation))
    return found


def errors_table() -> str:
    """The exceptions of specinfer.errors, each below the one that it is a kind of."""
    rows = ["| exception | is a | raised when |", "|---|---|---|"]
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind.__module__ == errors.__name__:
            first = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            rows.append(f"| `{name}` | {bases} | {first} |")
    return "\n".join(rows)


def levels_table() -> str:
    """The levels of CPUs that kernels are compiled for, the best last."""
    rows = ["| architecture | level | instructions | the CPU must have |", "|---|---|---|---|"]
    rows += [
        f"| {level.architecture} | `{level.name}` | {level.words} | {' '.join(sorted(level.needs))} |"
        for level in LEVELS
    ]
    return "\n".join(rows)


def measured_table() -> str:
    """The CPUs that result pages were measured on, by the level of their kernels."""
    cpus: dict[str, set[str]] = defaultdict(set)
    for path in (BENCHMARKS / "results").glob("*.md"):
        for cpu, features in _HARDWARE.findall(path.read_text(encoding="utf-8")):
            cpus[level_of(features.split()).name].add(cpu)
    rows = ["| level | CPUs of result pages |", "|---|---|"]
    rows += [f"| `{one.name}` | {', '.join(sorted(cpus[one.name])) or 'none'} |" for one in LEVELS]
    return "\n".join(rows)


def level_of(features: Sequence[str]) -> Level:
    """The best level of a result page's features, which are the wide ones alone (report/provenance.py)."""
    has = {*features, *(("avx2",) if "avx512f" in features else ())}  # some pages leave it out
    named = {one: one.needs.intersection(WIDE) for one in LEVELS}
    fitting = [one for one in LEVELS if named[one] and named[one] <= has]
    return max(fitting, key=lambda one: len(named[one]))  # the first of equals


def support_table() -> str:
    """The matrix of features: whether two of them work together."""

    def refused(row: Feature, column: Feature) -> bool:
        features = [{one, *IMPLIED.get(one, ())} for one in (row, column)]
        return any((a, b) in REFUSED or (b, a) in REFUSED for a, b in product(*features))

    columns = [one for one in Feature if any(pair[1] is one for pair in REFUSED)]
    rows = ["| |" + "".join(f" {one} |" for one in columns), "|---" * (1 + len(columns)) + "|"]
    for row in Feature:
        if any(pair[0] is row for pair in REFUSED):
            cells = "".join(f" {'no' if refused(row, column) else 'yes'} |" for column in columns)
            rows.append(f"| {row} |{cells}")
    return "\n".join(rows)


def refusals_table() -> str:
    """The pairs of features that are refused, with their errors."""
    rows = ["| feature | with | error |", "|---|---|---|"]
    for (one, other), sentence in REFUSED.items():
        rows.append(f"| {one} | {other} | {sentence.replace('!r', '').format('...', '...')} |")
    return "\n".join(rows)


TABLES = {
    "metrics": metrics_table,
    "errors": errors_table,
    "kernels": levels_table,
    "measured": measured_table,
    "support": support_table,
    "refusals": refusals_table,
}


def with_tables(markdown: str) -> str:
    """The text of a page with current tables; raises KeyError for a table that does not exist."""
    marked = r"(<!-- table: (\w+) -->\n)(?:\n\|(?:.*\|\n)+)?"
    return re.sub(marked, lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n", markdown)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (current := with_tables(text)) != text:
            page.write_text(current, encoding="utf-8")
