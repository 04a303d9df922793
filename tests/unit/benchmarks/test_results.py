"""What lies in benchmarks/results/: pages, and cells that a script goes on from, small enough to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MOST_BYTES = 450_000  # of the whole folder
LONGEST_LINE = 5_000  # characters; a cell is a line
KEPT = sorted(RESULTS.glob("*.json"))


def test_the_folder_is_small_and_its_lines_can_be_read() -> None:
    files = list(RESULTS.iterdir())
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    long = {name for name, text in texts.items() if max(map(len, text.splitlines())) > LONGEST_LINE}
    assert long == set()


def test_everything_is_a_page_or_belongs_to_one() -> None:
    pages = {path.stem for path in RESULTS.glob("*.md")}
    assert {path.stem for path in KEPT} - pages == set()
    assert {path.suffix for path in RESULTS.iterdir()} == {".md", ".json"}, "pictures are in docs/images"


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.name)
def test_a_page_says_what_its_cells_say(script: Callable[[str], ModuleType], file: Path) -> None:
    kept = json.loads(file.read_text(encoding="utf-8"))
    question = file.name.partition("_")[0]
    rows = ROWS[question](script(question), kept["settings"], kept["cells"])
    page = file.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    there = {_cells(line) for line in page if line.startswith("|")}
    assert len(rows) >= 10
    assert [row for row in rows if _cells(row) not in there] == []


def _peers(module: ModuleType, settings: Any, cells: Any) -> list[str]:
    return _table(module.page(module.shown([], cells), cells, settings))


def _table2(module: ModuleType, settings: Any, cells: Any) -> list[str]:
    study = SimpleNamespace(settings=settings, cells=cells)
    return _table(module.page(study, ["alpaca", "chatgpt_prompts", "webquestions", "piqa"]))


def _prediction(module: ModuleType, settings: Any, cells: Any) -> list[str]:
    return _table(module.page(module.read_edits(), cells, settings))


def _parameters(module: ModuleType, settings: Any, cells: Any) -> list[str]:
    return [module.row_of(name, cell) for name, cell in cells.items()]


def _serving(module: ModuleType, settings: Any, cells: Any) -> list[str]:
    return _table(module.page(module.shown([], cells), cells, settings))


ROWS = {
    "serving": _serving,
    "peers": _peers,
    "table2": _table2,
    "prediction": _prediction,
    "parameters": _parameters,
}


def _table(page: list[str]) -> list[str]:
    return [line for line in page if line.startswith("|")]


def _cells(row: str) -> tuple[str, ...]:
    row = row.replace(", with AMX bf16", "")  # older pages do not say it
    return tuple(cell.strip() for cell in row.strip("| ").split("|"))
