"""A question of the paper: its cells, and the page, plot and verdict that they make."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from matplotlib.figure import Figure as Figure  # modules of questions draw on one

from benchmarks.paper.lab import Lab
from specinfer.errors import UserError
from specinfer.files import write_whole
from specinfer.report.provenance import commit, hardware

Figures = Mapping[str, Any]  # plain JSON values
Outcome = Literal["surpassed", "reproduced", "new"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row of the index."""

    ours: str
    paper: str = "-"
    outcome: Outcome = "new"  # the paper has no such figure
    against: str = ""  # why it did not hold, if it did not


class Cells(Mapping[str, Figures]):
    """The measured cells of a question by key, in the order of its keys; each has its own file.

    A key is a list of words with commas. A file holds figures, size, and commit, machine and date of the
    measurement; `source` names the page of an older measurement that the figures are from, "" if it is gone.
    """

    def __init__(self, folder: Path, size: str, keys: Sequence[str]) -> None:
        """Read the files of these keys; raises UserError for a cell of another size."""
        self.folder, self.size, self._keys = folder, size, keys
        self._cells: dict[str, dict[str, Any]] = {}
        for key in keys:
            if (file := folder / f"{key}.json").exists():
                cell = self._cells[key] = json.loads(file.read_text(encoding="utf-8"))
                if cell["size"] != size:
                    raise UserError(f"{file} is a {cell['size']} cell, not a {size} one; give another --out")

    def __getitem__(self, key: str) -> Figures:
        figures: Figures = self._cells[key]["figures"]
        return figures

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._keys if key in self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def has(self, key: str, models: Collection[str]) -> bool:
        """Return whether a cell is there, of this machine and of `models`, or of an older page."""
        cell = self._cells.get(key)
        own = cell is not None and cell["machine"] == _machine() and {*cell["models"]} <= {*models}
        return own or (cell is not None and "source" in cell)

    def keep(self, key: str, figures: Figures, models: Sequence[str]) -> None:
        """Add a cell, and write its file."""
        cell = {
            **{"figures": figures, "size": self.size, "models": list(models), "commit": commit()},
            "machine": _machine(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        if not write_whole(self.folder / f"{key}.json", json.dumps(cell, indent=1) + "\n"):
            raise UserError(f"cannot write into {self.folder}; is it writable, is the disk full?")
        self._cells[key] = json.loads(json.dumps(cell))

    def settings(self) -> list[str]:
        """Return a line for each combination of models, machine, commit and date of the cells."""
        found = Counter(
            f"{' and '.join(cell['models']) or 'no model'}; {cell['machine']}; "
            f"commit {cell['commit'] or 'unknown'}; {cell['date']}"
            + (f", from [an older page]({cell['source']})" if cell.get("source") else "")
            for cell in map(self._cells.__getitem__, self)
        )
        return [f"- {number} cell{'s' * (number > 1)}: {line}" for line, number in found.items()]


def _machine() -> str:
    machine = hardware()
    return f"{machine['cpu']}, {machine['cores']} cores"


class Question(Protocol):
    """A module with a question, whose name is that of the page, of the plot and of the folder of cells.

    `page` returns the tables and, in two sentences, their meaning; `plot` draws on a Figure that is made for
    it. These and `verdict` get the cells that exist, which may not be all.
    """

    @property
    def __name__(self) -> str: ...
    @property
    def ASKS(self) -> str: ...  # the heading
    def keys(self, lab: Lab) -> Sequence[str]: ...
    def measure(self, lab: Lab, key: str) -> Figures: ...  # one cell; raises UserError where it cannot
    def page(self, cells: Cells) -> Sequence[str]: ...
    def plot(self, cells: Cells, figure: Figure) -> None: ...
    def verdict(self, cells: Cells) -> Verdict: ...


def name_of(question: Question) -> str:
    """Return the name of its page."""
    return question.__name__.rpartition(".")[2]
