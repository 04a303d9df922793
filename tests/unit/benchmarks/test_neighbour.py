"""benchmarks/load/neighbour.py: neighbours come and go, and a page says what is left of the speed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("neighbour")


def test_neighbours_are_there_for_the_time_of_the_block(bench: ModuleType) -> None:
    me = psutil.Process()
    before = set(me.children())
    with bench.neighbours(2):
        busy = set(me.children()) - before
        assert len(busy) == 2
    assert not any(process.is_running() for process in busy)


def test_a_model_is_measured_in_turns(bench: ModuleType, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, vocab_size=256, tokenizer=True)
    args = argparse.Namespace(
        model=str(folder), neighbours=1, tokens=4, rounds=2, threads=1, quantization="none"
    )
    rates = bench.measure(str(folder), "none", args)
    assert [len(rates[name]) for name in ("alone", "beside")] == [2, 2]
    assert all(rate > 0 for of_one in rates.values() for rate in of_one)


def test_the_page_says_what_is_left(bench: ModuleType, tmp_path: Path) -> None:
    study = bench.Study("neighbour", tmp_path / "page.md", {"model": "m", "neighbours": 1, "rounds": 3})
    study.keep("int8", {"alone": [90.0, 100.0, 110.0], "beside": [40.0, 50.0, 70.0]})
    page = bench.page(study)
    assert page[0] == "# Decoding beside 1 busy process(es): m"
    assert page[-1] == "| int8 | 100.0 (90.0 to 110.0) | 50.0 (40.0 to 70.0) | 0.50 |"
