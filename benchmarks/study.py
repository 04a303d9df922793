"""Common options, resumable cells and result pages with provenance, for all scripts here.

    options = parser(__doc__, model=REQUIRED, dataset=REQUIRED, limit=50)       the common options it takes
    args = options.parse_args()
    study = Study("perplexity", args.out, {"model": args.model, ...})             continues an earlier run
    for name in ...:
        if name not in study.cells:
            study.keep(name, measure(...))                                      on disk, one cell per line
    study.write(page(study.cells))                                              Markdown, with provenance

A study's cells are stored beside its page, as .json. They belong to its settings; cells of other settings are
refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from specinfer import LLM, RequestOutput, SamplingParams, SpecInferError, SpeculationFigures
from specinfer.files import write_whole
from specinfer.report.dataset import Conversation, Dataset
from specinfer.report.provenance import commit, hardware, provenance
from specinfer.speculation_config import NO_SPECULATION

RESULTS = Path(__file__).parent / "results"
REQUIRED: Any = object()  # default of an option that must be given


def run(main: Callable[[], None]) -> None:
    """Run a script; a user's mistake prints one line."""
    try:
        main()
    except SpecInferError as error:
        sys.exit(f"error: {error}")


def natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; allowed: an integer >= 1")
    return int(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"help": "the target: folder, GGUF file or name"},
    "draft": {"help": "the small model of the modes with +draft, which else are left out"},
    "engines": {"help": "names, comma-separated, * for any text"},
    "timeout": {"help": "seconds for one answer, or to start", "type": float},
    "home": {"help": "folder of the other engines (SPECINFER_PEERS)", "type": Path},
    "dataset": {"help": "prompts; repeatable", "action": "append", "type": Path, "metavar": "FILE.jsonl"},
    "limit": {"help": "prompts of each data set", "type": natural},
    "max_tokens": {"help": "of each answer", "type": natural},
    "rounds": {"help": "rounds in turns", "type": natural},
    "threads": {"help": "that compute; default: physical cores", "type": natural},
}


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with --out and the named common options, each with its default here."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        keywords = dict(_OPTIONS[name], required=default is REQUIRED)
        if default is not REQUIRED:
            keywords["default"] = default
            keywords["help"] += f" (default {default})" if isinstance(default, int | float | str) else ""
        made.add_argument("--" + name.replace("_", "-"), **keywords)
    made.add_argument("--out", type=Path, help="Markdown file (default: benchmarks/results/...)")
    return made


class Study:
    """Cells by name, each on disk once it is measured, and the page made from them."""

    def __init__(self, question: str, out: Path | None, settings: Mapping[str, Any]) -> None:
        """Read the cells of an earlier run; exits if the file has other settings."""
        self.out = out or default_result(question, Path(settings["model"]).stem)
        self.file = self.out.with_suffix(".json")
        if self.file == self.out:
            sys.exit(f"error: got --out {self.out}; cells would lie where the page does: give a page, .md")
        self.settings = json.loads(json.dumps(settings))
        self.cells: dict[str, Any] = {}
        if self.file.exists():
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            if (found := stored["settings"]) != self.settings:
                sys.exit(f"error: {self.file} has cells of {found}, not {self.settings}; give another --out")
            self.cells = stored["cells"]

    def keep(self, name: str, cell: Mapping[str, Any]) -> None:
        """Add a cell with its commit, and write all cells, one per line."""
        self.cells[name] = {**cell, "commit": commit()}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.cells.items())
        _write(self.file, f'{{"settings": {json.dumps(self.settings)},\n"cells": {{\n{lines}\n}}}}\n')

    def write(self, lines: Sequence[str], threads: int | None = None) -> str:
        """Write the page, in Markdown, with provenance; `threads` is the option."""
        commits = {cell["commit"] for cell in self.cells.values()}
        named = ", ".join(sorted(sha or "not a checkout" for sha in commits))
        others = [f"- cells measured at: {named}"] if commits - {commit()} else []
        text = re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "", *provenance_lines(threads), *others, ""]))
        _write(self.out, text)
        return text


def provenance_lines(threads: int | None = None) -> list[str]:
    """Return Markdown lines with the provenance of the figures above; `threads` is the option."""
    facts = provenance(threads)
    versions, machine = facts["versions"], facts["hardware"]
    script = Path(sys.argv[0])
    module = f"benchmarks.{script.parent.name}.{script.stem}"
    command = " ".join(["python", "-m", module, *map(_short, sys.argv[1:])])
    return [
        f"- date: {facts['date'][:10]}",
        f"- command: `{command}`",
        f"- commit: {facts['commit'] or 'not a checkout'}",
        f"- specinfer {versions['specinfer']}, Python {versions['python']}, torch {versions['torch']}",
        f"- hardware: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['threads']} threads"
        + "".join(f", {gpu}" for gpu in machine["gpus"]),
    ]


def default_result(question: str, model: str) -> Path:
    """Return results/<question>_<model>_<hardware>_<date>.md, which may exist already."""
    facts = hardware()
    brand = re.split(r" \(family| amx| avx", facts["cpu"])[0]
    machine = "-".join([*re.findall(r"[a-z0-9.]+", brand.lower()), f"{facts['cores']}c"])
    return RESULTS / f"{question}_{model.lower()}_{machine}_{datetime.now(UTC):%Y-%m-%d}.md"


def in_turn(datasets: Sequence[Dataset], limit: int) -> list[Conversation]:
    """Return the first conversations of the data sets in turn, `limit` in all."""
    columns = [dataset.conversations for dataset in datasets]
    mixed = chain.from_iterable(zip_longest(*columns))
    return [conversation for conversation in mixed if conversation is not None][:limit]


def without_speculation(llm: LLM) -> LLM:
    """Return an LLM with the same weights and options and no speculators; grammars still force tokens."""
    return llm.variant(replace(llm.config, speculation=NO_SPECULATION))


def ask(
    llm: LLM, questions: Sequence[str], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Return the answers, with the chat template if there is one."""
    if llm.tokenizer.has_chat_template:
        return llm.chat([[{"role": "user", "content": text}] for text in questions], params)
    return llm.generate(questions, params)


def total_figures(outputs: Iterable[RequestOutput]) -> SpeculationFigures:
    total = SpeculationFigures()
    for output in outputs:
        total.add(output.figures)
    return total


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(header: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a Markdown table between empty lines; bars separate the columns of the header."""
    names = header.split(" | ")
    return ["", row(*names), row(*["---"] * len(names)), *(row(*cells) for cells in rows), ""]


def shown(figures: Iterable[float | None], digits: int = 2) -> list[str]:
    """Return figures as text, empty if one is None or not a number."""
    return ["" if one is None or math.isnan(one) else f"{one:.{digits}f}" for one in figures]


def spread(values: Sequence[float], digits: int) -> str:
    """Return "median [least - most]", or the only value."""
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
    return middle if len(values) == 1 else f"{middle} [{low} - {high}]"


def span(values: Sequence[float], digits: int) -> str:
    """Return "least to most", or the only value."""
    low, high = (f"{f(values):.{digits}f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def digest(value: Any) -> str:
    """Return a digest of a cell's question or settings."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    if not write_whole(path, text):
        sys.exit(f"error: cannot write {path}; is its folder writable, is the disk full?")


def _short(argument: str) -> str:
    """Return the last part of a path, as folders of one machine are irrelevant."""
    name, sign, path = argument.rpartition("=")
    return name + sign + (Path(path).name if "/" in path else path)
