"""benchmarks/load/replicas.py: measurements and page."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from specinfer.bench.exchange import Exchange

SETTINGS = {
    **{"model": "m", "quantization": "int8", "users": 16, "minutes": 3, "threads": 1, "batch_size": 16},
    **{"max_tokens": 64, "kill_every": 3, "pinned": True},
}


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("replicas")


def cell(**more: Any) -> dict[str, Any]:
    usual = {"requests": 10, "failed": 0, "kills": 0, "seconds": 10.0, "tokens": 400, "gap_p95": 0.1}
    usual |= {"gap_most": 0.5, "gaps": [], "second_turns": 5, "found": 4, "different": 0, "commit": None}
    return usual | more


def test_kills_are_measured_by_twenty(bench: ModuleType) -> None:
    asked = Namespace(rounds=2, replicas=3, kills=41, only=None)
    plain = [("plain", 1, 0), ("plain", 3, 0), ("plain", 1, 1), ("plain", 3, 1)]
    kills = [("kills", 3, 0), ("kills", 3, 1), ("kills", 3, 2)]
    rest = [("replacing", 3, 0), ("channel", 1, 0), ("channel", 1, 1)]
    assert bench.cells(asked) == [*plain, *kills, *rest]
    asked.only = ["kills"]
    assert bench.cells(asked) == kills


class FakeProcess(NamedTuple):
    """A process as psutil shows it."""

    pid: int
    started: float
    below: tuple[FakeProcess, ...] = ()

    def children(self) -> list[FakeProcess]:
        return list(self.below)

    def create_time(self) -> float:
        return self.started


def test_faults_take_turns_over_ranks(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeProcess(4, 1.0, (FakeProcess(9, 3.0), FakeProcess(8, 3.0), FakeProcess(20, 2.5)))
    second = FakeProcess(3, 2.0, (FakeProcess(7, 4.0),))
    server = FakeProcess(1, 0.0, (second, first))
    monkeypatch.setattr(bench.psutil, "Process", lambda pid: {1: server}[pid])
    assert [bench.victim(1, number).pid for number in range(8)] == [4, 20, 8, 9, 3, 7, 4, 20]


def test_gaps_are_those_of_the_streams_that_moved(bench: ModuleType) -> None:
    def turn(*arrivals: float) -> Any:
        return bench.Turn(0, [], Exchange(0.0, arrivals=list(arrivals)))

    turns = [turn(1.0, 1.1, 3.0, 3.1), turn(1.05, 1.15, 1.25), turn(2.0, 9.0), turn(0.5, 1.9, 2.0)]
    load = bench.Load([], 64, turns, killed=[(1.12, 2), (1.12, 0), (5.0, 3)])
    assert bench.gaps_of(load) == pytest.approx([1.4, 1.9, 7.0])


def test_gaps_are_drawn_where_streams_moved(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "page.png"
    assert not bench.draw({"plain, 1, 0": cell()}, picture)
    assert not picture.exists()
    assert bench.draw({"kills, 2, 0": cell(gaps=[0.5, 0.2])}, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_page_adds_up_the_cells_of_a_kind(bench: ModuleType) -> None:
    found = {
        "plain, 1, 0": cell(),
        "plain, 2, 0": cell(tokens=700),
        "kills, 2, 0": cell(kills=20, gaps=[0.5] * 30, gap_most=0.5),
        "kills, 2, 1": cell(kills=20, gaps=[2.0] * 10, gap_most=2.0, different=1),
        "channel, 1, 0": dict.fromkeys(("lag", "lag_p99", "answer", "server_cpu", "process_cpu"), 0.001)
        | {"talker_cpu": 0.0, "commit": None},
    }
    page = bench.page(SETTINGS, found)
    assert "Output tokens/s, 2 replicas over one, medians: 1.75." in page
    assert "| kills | 2 | 20; 0 | 1 | 40 | 40.0 | 2.000 | 2.00 | 8 of 10 |" in page
    assert "| a process | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |  |" in page
    assert "Everything, users too, has as many cores as there are replicas." in page
    assert bench.page(SETTINGS | {"pinned": False}, {}) == page[:3]


def test_a_block_has_so_many_cores(bench: ModuleType) -> None:
    before = os.sched_getaffinity(0)
    with bench.cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    with bench.cores(0):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
