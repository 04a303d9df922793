"""benchmarks/results/ has small pages, their pictures, and no raw data."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MAX_BYTES = 200_000  # of the whole folder
LONGEST_LINE = 5_000  # characters
LARGEST_PICTURE = 60_000  # bytes


def test_the_folder_holds_pages_that_can_be_read() -> None:
    pages = [path for path in RESULTS.iterdir() if path.suffix == ".md"]
    assert sum(path.stat().st_size for path in pages) < MAX_BYTES
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    long = {name for name, text in texts.items() if max(map(len, text.splitlines())) > LONGEST_LINE}
    assert long == set()


def test_all_other_files_are_pictures_of_pages() -> None:
    """Cells stay beside the page of the person who measures."""
    others = {path for path in RESULTS.iterdir() if path.suffix != ".md" and path.name != "CURRENT.toml"}
    for picture in others:
        assert picture.suffix == ".png"
        assert f"({picture.name})" in picture.with_suffix(".md").read_text(encoding="utf-8")
        assert picture.stat().st_size < LARGEST_PICTURE
