"""benchmarks/study.py: cells that outlive an interruption, the page, the options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.thorough

SETTINGS = {"model": "small.gguf", "modes": ("a", "b")}


@pytest.fixture(scope="module")
def study(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("study")


@pytest.fixture(autouse=True)
def commit(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says which commit runs."""

    def now(sha: str) -> None:
        monkeypatch.setattr(study, "commit", lambda: sha)

    now("aaa")
    return now


def test_cells_are_on_disk_one_a_line_and_are_there_again(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "results" / "page.md"
    first = study.Study("speed", out, SETTINGS)
    assert first.cells == {}
    first.keep("greedy|1", {"steps": 3, "texts": [[1, 2], [3]]})
    first.keep("T=1", {"steps": 4})
    kept = {"greedy|1": {"steps": 3, "texts": [[1, 2], [3]], "commit": "aaa"}}
    kept["T=1"] = {"steps": 4, "commit": "aaa"}
    assert study.Study("speed", out, SETTINGS).cells == kept
    file = out.with_suffix(".json")
    assert json.loads(file.read_text()) == {"settings": {**SETTINGS, "modes": ["a", "b"]}, "cells": kept}
    assert [line[:10] for line in file.read_text().splitlines()] == [
        '{"settings',
        '"cells": {',
        '"greedy|1"',
        '"T=1": {"s',
        "}}",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["page.json"]


def test_cells_of_other_settings_are_refused(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    study.Study("speed", out, SETTINGS).keep("one", {})
    with pytest.raises(SystemExit, match=r"got --out .*page.json; cells would lie where the page does"):
        study.Study("q", out.with_suffix(".json"), SETTINGS)
    with pytest.raises(SystemExit, match=r"page.json holds cells of .*small.*, not .*large.*another --out"):
        study.Study("speed", out, {**SETTINGS, "model": "large.gguf"})


def test_a_cell_that_was_measured_of_something_else_is_measured_again(
    study: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "page.md"
    first = study.Study("speed", out, SETTINGS)
    for name in ("same", "changed", "gone"):
        first.keep(name, {"digest": study.digest(name)})
    now = {"same": study.digest("same"), "changed": study.digest("other"), "new": study.digest("new")}
    assert list(study.Study("speed", out, SETTINGS, now).cells) == ["same"]
