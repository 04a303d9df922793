"""Resumable cells, result pages with provenance, and tables, for all scripts here.

    study = Study(args.out, {"model": args.model, ...})                          continues an earlier run
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
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from specinfer import LLM, RequestOutput, SamplingParams, SpecInferError, SpeculationFigures
from specinfer.files import write_whole
from specinfer.hub.model_files import ModelFiles
from specinfer.report.dataset import Conversation, Dataset
from specinfer.report.provenance import commit, provenance
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tokenizer import ChatEncoder, Tokenizer


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


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of a script's options, which shows its description unchanged."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


class Study:
    """Cells by name, each on disk once it is measured, and the page made from them."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        """Read the cells of an earlier run; exits if the file has other settings."""
        self.out, self.file = out, out.with_suffix(".json")
        if self.file == out:
            sys.exit(f"error: got --out {out}; cells would lie where the page does: give a page, .md")
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
        facts, script = provenance(threads), Path(sys.argv[0])
        versions, machine = facts["versions"], facts["hardware"]
        module = f"benchmarks.{script.parent.name}.{script.stem}"
        about = [
            f"- date: {facts['date'][:10]}",
            f"- command: `{' '.join(['python', '-m', module, *map(_short, sys.argv[1:])])}`",
            f"- commit: {facts['commit'] or 'not a checkout'}",
            f"- specinfer {versions['specinfer']}, Python {versions['python']}, torch {versions['torch']}",
            f"- hardware: {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['threads']} threads"
            + "".join(f", {gpu}" for gpu in machine["gpus"]),
            *([f"- cells measured at: {named}"] if commits - {commit()} else []),
        ]
        text = re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "", *about, ""]))
        _write(self.out, text)
        return text


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


def prompt_ids(model: ModelFiles, questions: Iterable[str]) -> list[list[int]]:
    """Return the token ids of questions in the chat template."""
    encode = ChatEncoder(Tokenizer.load(model)).token_ids
    return [encode([{"role": "user", "content": text}]) for text in questions]


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
