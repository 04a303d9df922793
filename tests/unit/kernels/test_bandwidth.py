"""Memory's speed: over which memory it is measured, and what is held against it."""

from __future__ import annotations

import ctypes
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


def test_what_is_read_was_written_after_large_pages_were_asked_for() -> None:
    class Writing(Streaming):
        """Its memory is all ones until it is written."""

        def want_huge_pages(self, address: int, size: int) -> None:
            super().want_huge_pages(address, size)
            ctypes.memset(address, 255, size)

    library: Any = Writing(1e9)
    bandwidth = Bandwidth(library, SIZE)
    assert not library.streamed
    bandwidth.measure()
    assert library.huge == library.streamed
    ((address, size),) = library.streamed
    assert ctypes.string_at(address, size) == bytes(SIZE)


def test_a_call_is_held_against_the_bandwidth_right_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.004, 0.001, 0.002])
    monkeypatch.setattr(module, "seconds", lambda call: next(taken))
    library: Any = Streaming(1e9, 1e9, 1e9, 0.5e9)
    milliseconds, times = Bandwidth(library, 64).compare(lambda: None, 1e6, 3)
    assert milliseconds == pytest.approx(2.0)
    assert times == pytest.approx(4 / 3)  # 4, 1 and 2 ms; 1 MB streams in 1 or 2 ms: 2 / 1.5


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
