"""Writes the page and the plot of a question, and the index of all."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.question import Cells, Question
from benchmarks.study import row
from specinfer.errors import UserError
from specinfer.files import write_whole

_INK = "#7f7f7f"  # of text and axes: readable on white and on black
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # for all kinds of eyes
_STYLE = {
    "svg.hashsalt": "specinfer",  # names in the file depend on nothing else
    "svg.fonttype": "none",
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 10,
}


def write_page(out: Path, question: Question, cells: Cells) -> None:
    """Write NAME.md and NAME.svg into `out`; the same cells give the same bytes. Raises UserError."""
    _write(out / f"{question.name}.svg", svg(question, cells))
    note = [] if cells.size == "full" else [f"This is a {cells.size} run: few prompts, short answers.", ""]
    size = "" if cells.size == "full" else f"--{cells.size} "
    lines = [
        f"# {question.asks}",
        "",
        *note,
        *question.page(cells),
        "",
        f"![{question.asks}]({question.name}.svg)",
        "",
        "Measured with:",
        "",
        *cells.settings(),
        f'- command: `make paper ARGS="{size}--only {question.name}"`',
    ]
    _write(out / f"{question.name}.md", "\n".join([*lines, ""]))


def svg(question: Question, cells: Cells) -> str:
    """Return the plot of the cells, for light and dark pages."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=_COLORS)}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        question.plot(cells, figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def write_index(out: Path, questions: Sequence[tuple[Question, Cells]]) -> None:
    """Write index.md: a row for every question with cells."""
    lines = [
        "# The paper's questions",
        "",
        "[SpecInfer](https://arxiv.org/abs/2305.09781) measured LLaMA-7B and larger with drafts of 68M on "
        "GPUs. These pages ask its questions again, with models that a small machine runs. `make paper` "
        "measures "
        "all cells in hours, `make paper ARGS=--quick` a part of them in 20 minutes.",
        "",
        "| question | paper | ours | |",
        "|---|---|---|---|",
    ]
    for question, cells in questions:
        if cells:
            verdict = question.verdict(cells)
            outcome = verdict.outcome + (f": {verdict.why}" if verdict.why else "")
            lines.append(row(f"[{question.asks}]({question.name}.md)", verdict.paper, verdict.ours, outcome))
    _write(out / "index.md", "\n".join([*lines, ""]))


def _write(path: Path, text: str) -> None:
    text = re.sub(r"^\|.*", lambda found: re.sub(r" *\| *", "|", found[0]), text, flags=re.M)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not write_whole(path, text):
        raise UserError(f"cannot write {path}; is its folder writable, is the disk full?")
