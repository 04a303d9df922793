"""Workloads of recorded texts, and which of them run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specinfer.replay.replay import mixed
from specinfer.replay.trace import read_trace


@pytest.fixture(scope="module")
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("policy_traces")


def test_a_ramp_has_every_text_once_and_a_neighbour_every_other_few(
    module: ModuleType, traces: list[Path]
) -> None:
    trace = read_trace(traces[0])
    for sizes in ((1, 4, 2), (1, 2, 4, 8, 16, 8, 4, 2, 1)):
        ramp = module.ramp([trace] * 3, sizes)
        assert [text for part in ramp for text in part.texts] == [*mixed([trace] * 3)[0].texts]
    assert [part.at_once for part in module.ramp([trace, trace], (1, 4, 2))] == [1, 4, 2]
    parts = module.disturbed(mixed([trace, trace, trace]), 2.0, texts=2)
    assert [part.slowdown for part in parts] == [1.0, 2.0, 1.0, 2.0, 1.0][: len(parts)]
    assert sum(len(part.texts) for part in parts) == 3 * len(trace.texts)
