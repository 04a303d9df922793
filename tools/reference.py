"""Write the parts of pages that are made from the code and from result pages: python tools/reference.py.

A page has `<!-- made: NAME -->` before such a part, and `<!-- end -->` behind it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer import errors
from specinfer.cli import cli
from specinfer.cli.options import sampling_options
from specinfer.config import ENGINE_OPTIONS
from specinfer.kernels.machine import LEVELS, Level
from specinfer.option import Option, options_of
from specinfer.report.provenance import WIDE
from specinfer.serve.config import ServeConfig
from specinfer.serve.observe.metrics import Metrics
from specinfer.support import REFUSED, Feature

DOCS = Path(__file__).resolve().parents[1] / "docs"
BENCHMARKS = DOCS.parent / "benchmarks"
ENGINE = [one for _, one in ENGINE_OPTIONS.values()]
SERVER = list(options_of(ServeConfig))
IMPLIED: Final = {  # features that another one has, too
    Feature.GPU: [Feature.TORCH],
    Feature.TENSOR: [Feature.RANKS],
    Feature.PIPELINE: [Feature.RANKS],
    Feature.GGUF: [Feature.QUANTIZED],
    Feature.STREAMED: [Feature.OFFLOAD],
    Feature.DRAFT_GGUF: [Feature.DRAFT_QUANTIZED],
    Feature.MTP: [Feature.HEAD],
}
_WIDTH: Final = 100  # of help, in characters
_HARDWARE = re.compile(r"^- hardware: (.+? \(family \d+\)),? (.+?), \d+ cores", re.M)  # the CPU; its features


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; `head` is its first line."""
    rule = "|---" * (head.count("|") - 1) + "|"
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def options_table(options: Sequence[Option]) -> str:
    """Return a table of options, their defaults and their purposes."""
    rows = [
        (
            f"`{one.name}`{' *' if one.about.rare else ''}",
            one.about.shown or f"`{one.shown_default() or 'none'}`",
            f"{one.about.purpose} {one.about.more}".rstrip(),
        )
        for one in options
    ]
    return table("| option | default | |", rows)


def commands_text() -> str:
    """Return the help of each command, then the flags that commands share."""
    request = click.Context(click.command()(sampling_options(lambda **_: None)), show_default=True)
    shared = _records(request)
    blocks, accepted = [], defaultdict(list)
    for path, context in _leaves(click.Context(cli, info_name="specinfer")):
        of_engine, of_server = (_accepted(context.command, options) for options in (ENGINE, SERVER))
        records = _records(context)
        own = [record for record in records if record not in shared]
        blocks += [f"### {path}", _help(context, own)]
        if len(own) < len(records):
            blocks.append(f"`{path}` also has the [flags of a request](#flags-of-a-request).")
        if of_engine or of_server:
            accepted[of_engine, of_server].append(path)
    blocks += ["### Flags of a request", _help(request, shared)]
    rows = [(_listed(paths), *sets) for sets, paths in accepted.items()]
    blocks += ["These commands have [options](#options) of the engine and the server:"]
    return "\n\n".join([*blocks, table("| commands | of the engine | of the server |", rows)])


def _leaves(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Yield the commands below a group, each with its path."""
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, context, info_name=name, **command.context_settings)
        if isinstance(command, click.Group):
            yield from _leaves(below)
        else:
            yield below.command_path.removeprefix("specinfer "), below


def _records(context: click.Context) -> list[tuple[str, str]]:
    """Return the flags of a command and their help, without options of the engine and the server."""
    options = [one for one in context.command.params if isinstance(one, click.Option)]
    return [one.get_help_record(context) or ("", "") for one in options if _option_of(one) is None]


def _help(context: click.Context, records: Sequence[tuple[str, str]]) -> str:
    """Return a command's help with these options alone, as a block of text."""
    formatter = click.HelpFormatter(width=_WIDTH)
    if context.info_name is not None:
        context.command.format_usage(context, formatter)
        context.command.format_help_text(context, formatter)
    if records:
        formatter.write_paragraph()
        formatter.write_dl(records)
    return f"```text\n{formatter.getvalue().strip()}\n```"


def _option_of(param: click.Parameter) -> Option | None:
    """Return the option of the engine or the server that a parameter sets, or None."""
    for one in (*ENGINE, *SERVER):
        if param.opts[0] == one.flag and getattr(param, "help", "").startswith(one.about.purpose):
            return one
    return None


def _accepted(command: click.Command, options: Sequence[Option]) -> str:
    """Return which of the options a command accepts, as text; empty: none."""
    has, flagged = (
        [_option_of(param) for param in command.params],
        [one for one in options if not one.about.rare],
    )
    there, missing = (
        [one.flag for one in flagged if one in has],
        [one.flag for one in flagged if one not in has],
    )
    if not missing:
        return "all"
    return f"all but {_listed(missing)}" if len(missing) < len(there) else _listed(there)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def metrics_table() -> str:
    """The series of /metrics: name, kind, labels besides model_name, purpose."""
    found = []
    for collector in set(Metrics("model").registry._collector_to_names):  # the library has no public list
        [described] = collector.describe()
        name = described.name + ("_total" if described.type == "counter" else "")
        labels = _listed([label for label in collector._labelnames if label != "model_name"])
        found.append((f"`{name}`", described.type, labels, described.documentation))
    return table("| series | kind | labels | meaning |", sorted(found))


def errors_table() -> str:
    """The exceptions of specinfer.errors, each below the one that it is a kind of."""
    rows = [
        (
            f"`{name}`",
            _listed([base.__name__ for base in kind.__bases__]),
            (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " "),
        )
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    return table("| exception | is a | raised when |", rows)


def levels_table() -> str:
    """The levels of CPUs that kernels are compiled for, the best last."""
    rows = [(one.architecture, f"`{one.name}`", one.words, " ".join(sorted(one.needs))) for one in LEVELS]
    return table("| architecture | level | instructions | the CPU must have |", rows)


def measured_table() -> str:
    """The CPUs that result pages were measured on, by the level of their kernels."""
    cpus: dict[str, set[str]] = defaultdict(set)
    for path in (BENCHMARKS / "results").glob("*.md"):
        for cpu, features in _HARDWARE.findall(path.read_text(encoding="utf-8")):
            cpus[level_of(features.split()).name].add(cpu)
    rows = [(f"`{one.name}`", ", ".join(sorted(cpus[one.name])) or "none") for one in LEVELS]
    return table("| level | CPUs of result pages |", rows)


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
    rows = [
        (row, *("no" if refused(row, column) else "yes" for column in columns))
        for row in Feature
        if any(pair[0] is row for pair in REFUSED)
    ]
    return table(f"| | {' | '.join(columns)} |", rows)


PARTS: Final = {
    "commands": commands_text,
    "engine options": lambda: options_table(ENGINE),
    "server options": lambda: options_table(SERVER),
    "metrics": metrics_table,
    "errors": errors_table,
    "kernels": levels_table,
    "measured": measured_table,
    "support": support_table,
}
_PART = re.compile(r"(<!-- made: ([\w ]+) -->\n).*?(?=<!-- end -->)", re.S)


def written(page: str) -> str:
    """Return the text of a page with current parts; raises KeyError for a part that does not exist."""
    return _PART.sub(lambda place: f"{place[1]}\n{PARTS[place[2]]()}\n\n", page)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (current := written(text)) != text:
            page.write_text(current, encoding="utf-8")
