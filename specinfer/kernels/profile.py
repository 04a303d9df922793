"""Where the time of native calls goes, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from specinfer.kernels.choice import Kernels
from specinfer.kernels.library import STAGES


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
