"""A question of the paper: its cells, and the page, plot and verdict that they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specinfer.errors import UserError
from specinfer.files import write_whole
from specinfer.report.provenance import commit, hardware

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.paper.lab import Lab

Figures = Mapping[str, Any]  # plain JSON values
Outcome = Literal["surpassed", "reproduced", "did not hold", "new"]


class NotHereError(UserError):
    """This machine cannot measure a cell; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A row of the index."""

    paper: str  # its figure, or "-"
    ours: str
    outcome: Outcome  # "new": the paper has no such figure
    why: str = ""  # if it did not hold


class Cells(Mapping[str, Figures]):
    """The measured cells of a question by key, each in a file of its own.

    A key is a list of words with commas. A file holds figures, size, and commit, machine and date of the
    measurement; `source` names the page of an older measurement that the figures are from.
    """

    def __init__(self, folder: Path, size: str) -> None:
        """Read the files; raises UserError for a cell of another size."""
        self.folder = folder
        self.size = size
        self._cells: dict[str, dict[str, Any]] = {}
        for file in sorted(folder.glob("*.json")):
            cell = json.loads(file.read_text(encoding="utf-8"))
            if cell["size"] != size:
                raise UserError(f"{file} is a {cell['size']} cell, not a {size} one; give another --out")
            self._cells[file.stem] = cell

    def __getitem__(self, key: str) -> Figures:
        figures: Figures = self._cells[key]["figures"]
        return figures

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def keep(self, key: str, figures: Figures, models: Sequence[str]) -> None:
        """Add a cell, and write its file."""
        machine = hardware()
        cell = {
            "figures": figures,
            "size": self.size,
            "models": list(models),
            "commit": commit(),
            "machine": f"{machine['cpu']}, {machine['cores']} cores",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        if not write_whole(self.folder / f"{key}.json", json.dumps(cell, indent=1) + "\n"):
            raise UserError(f"cannot write into {self.folder}; is it writable, is the disk full?")
        self._cells[key] = json.loads(json.dumps(cell))

    def settings(self) -> list[str]:
        """Return a line for each combination of models, machine, commit and date of the cells."""
        found: dict[str, int] = {}
        for cell in self._cells.values():
            where = f", from [an older page]({cell['source']})" if "source" in cell else ""
            line = (
                f"{' and '.join(cell['models']) or 'no model'}; {cell['machine']}; "
                f"commit {cell['commit'] or 'unknown'}; {cell['date']}{where}"
            )
            found[line] = found.get(line, 0) + 1
        return [f"- {number} cells: {line}" for line, number in found.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, which has a page of its own.

    `page` returns the tables and, in two sentences, their meaning; `plot` draws on a Figure that is made for
    it. All three get the cells that exist, which may not be all.
    """

    name: str  # of the page, of the plot and of the folder of cells
    asks: str  # the heading
    keys: Callable[[Lab], Sequence[str]]
    measure: Callable[[Lab, str], Figures]  # one cell; raises NotHereError
    page: Callable[[Cells], Sequence[str]]
    plot: Callable[[Cells, Figure], None]
    verdict: Callable[[Cells], Verdict]
