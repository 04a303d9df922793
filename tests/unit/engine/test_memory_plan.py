"""Memory plans: resident and streamed weights, and drafts, from sizes and rates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specinfer.engine.memory import STREAM_LIMITS, DraftSet, MemoryPlan, StreamLimits, best_plan
from specinfer.kernels.disk import DiskRate
from specinfer.models.placement import Placement

GB = 10**9
LAYERS = [GB] * 10
NONE = DraftSet()
TWIN = DraftSet(("self",), weights=3 * GB, reads=3 * GB, rate=0.9)


def plan(
    memory: int, rate: float, drafts: DraftSet = NONE, limits: StreamLimits = STREAM_LIMITS[0]
) -> MemoryPlan:
    parts = {"this process": GB, "drafts": drafts.weights}
    placement = Placement.within(memory, parts, LAYERS, buffers=2)
    disk = DiskRate(readers=1, piece=1 << 22, bytes_per_second=rate, direct=True)
    prepared: Any = SimpleNamespace(path=Path("/disk/model.safetensors"))
    return MemoryPlan(placement, drafts, limits, 0, disk, 50e9, prepared)


def test_the_seconds_of_a_pass_are_the_disks_or_those_of_computing() -> None:
    assert plan(8 * GB, 2e9).placement.streamed_bytes == 5 * GB  # 1 process, 2 buffers, 5 layers
    assert plan(8 * GB, 2e9).pass_seconds() == 2.5
    assert plan(20 * GB, 2e9).pass_seconds() == 0.2  # nothing is streamed: 10 GB at 50 GB/s
    assert plan(8 * GB, 100e9).pass_seconds() == 0.2


def test_a_draft_is_expected_to_make_a_chain_of_the_best_length() -> None:
    slow = plan(8 * GB, 2e9, TWIN)
    assert slow.placement.streamed_bytes == 8 * GB
    assert slow.plain_speed == 0.25
    levels = range(49)  # of 0.06 s each
    best = max((1 - 0.9 ** (n + 1)) / 0.1 / (4 + 0.06 * n) for n in levels)
    assert slow.speed == pytest.approx(best)
    assert plan(8 * GB, 2e9).speed == plan(8 * GB, 2e9).plain_speed


def test_the_fastest_plan_is_taken() -> None:
    for memory, rate, names in (
        (8 * GB, 0.5e9, ("self",)),
        (8 * GB, 2e9, ("self",)),
        (8 * GB, 50e9, ("self",)),  # a pass takes what computing takes
        (12 * GB, 2e9, ()),  # but for one layer everything is pinned
        (20 * GB, 2e9, ("self",)),
    ):
        assert best_plan([plan(memory, rate), plan(memory, rate, TWIN)]).drafts.names == names, (memory, rate)


def test_a_line_says_what_was_decided() -> None:
    assert str(plan(8 * GB, 2e9)) == (
        "5 of 10 layers streamed, 5.0 GB a pass at 2.0 GB/s from /disk, about 2.5 s a pass; about 0.4 "
        "tokens/s without guesses"
    )
    assert str(plan(8 * GB, 2e9, TWIN)) == (
        "8 of 10 layers streamed, 8.0 GB a pass at 2.0 GB/s from /disk, about 4.0 s a pass; draft: the "
        "target itself in fewer bits, 3.0 GB; about 0.25 tokens/s without guesses and 1.7 with, expected"
    )
