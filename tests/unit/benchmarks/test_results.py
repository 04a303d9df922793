"""benchmarks/results/ has small pages and no raw data."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MAX_BYTES = 200_000  # of the whole folder
LONGEST_LINE = 5_000  # characters


def test_the_folder_holds_pages_that_can_be_read() -> None:
    files = [path for path in RESULTS.iterdir() if path.name != "CURRENT.toml"]
    assert {path.suffix for path in files} == {".md"}, "cells stay beside the page of who measures"
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    long = {name for name, text in texts.items() if max(map(len, text.splitlines())) > LONGEST_LINE}
    assert long == set()
