"""Memory's speed: over which memory it is measured, and what is held against it."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.kernels import bandwidth as module
from specinfer.kernels.bandwidth import Bandwidth
from tests.kernels import kernels
from tests.streaming import Streaming

SIZE = 1 << 16


def test_the_usual_bandwidth_is_the_median_of_three_and_all_of_them_are_kept() -> None:
    library: Any = Streaming(1e9, 9e9, 2e9)
    bandwidth = Bandwidth(library, SIZE)
    assert bandwidth.median() == 2e9
    assert bandwidth.found == [1e9, 9e9, 2e9]
    ((address, size),) = set(library.streamed)
    assert (address % 64, size) == (0, SIZE), "whole cache lines"


def test_without_a_library_pytorch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Streams and calls in turns: memory slows down by half, and so does what is bound by it.
    taken = iter([0.010, 0.030, 0.010, 0.045, 0.020, 0.060, 0.020])
    bandwidth = Bandwidth(None, SIZE)
    monkeypatch.setattr(module, "seconds", lambda call: next(taken))
    milliseconds, times = bandwidth.compare(lambda: None, SIZE, 3)
    assert milliseconds == pytest.approx(45)
    assert times == pytest.approx(3)
    assert bandwidth.found == [SIZE / 0.010] * 2 + [SIZE / 0.020] * 2


def test_a_real_library_measures_something() -> None:
    assert Bandwidth(kernels("native").library, 1 << 20).median() > 1e6
