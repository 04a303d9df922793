"""Writes the page and the plot of a question, and the index of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.paper.plots import svg
from benchmarks.paper.question import Cells, Question, name_of
from benchmarks.study import table
from specinfer.errors import UserError
from specinfer.files import write_whole


def write_page(out: Path, question: Question, cells: Cells) -> None:
    """Write NAME.md and NAME.svg into `out`; the same cells give the same bytes. Raises UserError."""
    name, asks = name_of(question), question.ASKS
    _write(out / f"{name}.svg", svg(partial(question.plot, cells)))
    full = cells.size == "full"
    lines = [
        *(f"# {asks}", "", "" if full else f"This is a {cells.size} run: few prompts, short answers.", ""),
        *question.page(cells),
        *("", f"![{asks}]({name}.svg)", "", "Measured with:", "", *cells.settings()),
        f'- command: `make paper ARGS="--prompts DIR {"" if full else f"--{cells.size} "}--only {name}"`',
    ]
    _write(out / f"{name}.md", "\n".join([*lines, ""]))


def write_index(out: Path, questions: Sequence[tuple[Question, Cells]]) -> None:
    """Write index.md: a row for every question with cells."""
    rows = []
    for question, cells in questions:
        if cells:
            verdict = question.verdict(cells)
            outcome = f"did not hold: {verdict.against}" if verdict.against else verdict.outcome
            link = f"[{question.ASKS}]({name_of(question)}.md)"
            rows.append((link, verdict.paper, verdict.ours, outcome))
    lines = [
        "# The paper's questions",
        "",
        "[SpecInfer](https://arxiv.org/abs/2305.09781) measured LLaMA-7B and larger with drafts of 68M on "
        "GPUs. These pages ask its questions again, with models that a small machine runs. "
        "[Benchmarks](../benchmarks.md) says how to measure them on yours, whole or in part.",
        *table("question | paper | ours | ", rows),
    ]
    _write(out / "index.md", "\n".join(lines))


def _write(path: Path, text: str) -> None:
    text = re.sub(r"^\|.*", lambda found: re.sub(r" *\| *", "|", found[0]), text, flags=re.M)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not write_whole(path, re.sub(r"\n{3,}", "\n\n", text)):
        raise UserError(f"cannot write {path}; is its folder writable, is the disk full?")
