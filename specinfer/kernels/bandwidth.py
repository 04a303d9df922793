"""How fast memory streams, the floor of a pass, and where the time of native calls goes, stage by stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from specinfer.kernels.choice import Kernels
from specinfer.kernels.layout import in_huge_pages
from specinfer.kernels.library import Library
from specinfer.kernels.structures import STAGES

STREAMED: Final = 1 << 29  # bytes of one measurement: more than any cache holds
_USUAL: Final = 3  # measurements, of which the median is the usual one


class Bandwidth:
    """Bytes per second at which memory streams; measured right beside everything held against it.

    On a shared machine it may be twice as much a second later. Read from large pages where the system has
    them, as weights are. With native kernels their own reader measures it, which is the quickest there is;
    else torch.sum. All that was measured is in `found`.
    """

    def __init__(self, library: Library | None, size: int = STREAMED) -> None:
        """Measure with the threads that `library` has, or PyTorch, over `size` bytes."""
        self._library = library
        self._memory = torch.empty(size // 4)
        if library is not None:
            in_huge_pages(library, self._memory)
        self._memory.zero_()  # pages that nobody wrote are one page that stays in the cache
        self.found: list[float] = []

    def measure(self) -> float:
        """What it is now."""
        size = self._memory.nbytes
        if self._library is None:
            self.found.append(size / seconds(self._memory.sum))
        else:
            self.found.append(self._library.stream(self._memory.data_ptr(), size))
        return self.found[-1]

    def usual(self) -> float:
        """The median of some measurements."""
        return statistics.median(self.measure() for _ in range(_USUAL))

    def beside(self, call: Callable[[], object], size: float, repeats: int) -> tuple[float, float]:
        """Milliseconds of a call, and how many times as long as streaming `size` bytes that is: medians."""
        milliseconds, times = [], []
        before = self.measure()
        for _ in range(repeats):
            taken, after = seconds(call), self.measure()
            milliseconds.append(1e3 * taken)
            times.append(taken / (size / before + size / after) * 2)
            before = after
        return statistics.median(milliseconds), statistics.median(times)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def profiled(kernels: Kernels) -> Iterator[dict[str, int]]:
    """Nanoseconds of each stage of native calls inside the block, there when it has ended.

    Empty where the kernels are PyTorch's. Reading the clock takes some 50 ns a stage.
    """
    found: dict[str, int] = {}
    if kernels.library is None:
        yield found
        return
    nanoseconds = np.zeros(len(STAGES), dtype=np.int64)
    kernels.library.profile(1, nanoseconds.ctypes.data)
    try:
        yield found
    finally:
        kernels.library.profile(0, nanoseconds.ctypes.data)
        found.update(zip(STAGES, nanoseconds.tolist(), strict=True))
