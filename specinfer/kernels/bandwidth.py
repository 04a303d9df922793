"""Memory bandwidth, the lower bound of a pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from specinfer.kernels.layout import in_huge_pages
from specinfer.kernels.library import Library

STREAMED: Final = 1 << 29  # bytes of one measurement, more than any cache holds
_USUAL: Final = 3  # measurements whose median is taken


class Bandwidth:
    """Bytes per second of streaming memory; measure it next to each timing it is compared with.

    On a shared machine it may double within a second. Memory is in large pages if available, as weights are.
    Measured by the native kernels' fastest reader, else by torch.sum. All measurements are in `found`.
    """

    def __init__(self, library: Library | None, size: int = STREAMED) -> None:
        """Measure over `size` bytes with the threads of `library`, or of PyTorch."""
        self._library = library
        self._memory = torch.empty(size // 4)
        if library is not None:
            in_huge_pages(library, self._memory)
        self._memory.zero_()  # unwritten pages map to one zero page, which stays in the cache
        self.found: list[float] = []

    def measure(self) -> float:
        """Measure once."""
        size = self._memory.nbytes
        if self._library is None:
            self.found.append(size / seconds(self._memory.sum))
        else:
            self.found.append(self._library.stream(self._memory.data_ptr(), size))
        return self.found[-1]

    def median(self) -> float:
        """The median of a few measurements."""
        return statistics.median(self.measure() for _ in range(_USUAL))

    def compare(self, call: Callable[[], object], size: float, repeats: int) -> tuple[float, float]:
        """Median milliseconds of a call, and its ratio to the time of streaming `size` bytes."""
        milliseconds, times = [], []
        before = self.measure()
        for _ in range(repeats):
            taken, after = seconds(call), self.measure()
            milliseconds.append(1e3 * taken)
            times.append(taken / (size / before + size / after) * 2)
            before = after
        return statistics.median(milliseconds), statistics.median(times)


def seconds(call: Callable[[], object]) -> float:
    """The duration of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
