"""The scans of a row of logits in native code; specinfer/kernels/cpu/sampling.cpp has them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ensure
from specinfer.kernels.library import Library
from specinfer.verify.law import Law, inverse_temperature


class NativeScan:
    """A `verify.scan.Scan` that reads a row once."""

    __slots__ = ("_library",)

    def __init__(self, library: Library) -> None:
        self._library = library

    def most_likely(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
        """The ids of the n >= 1 largest logits, largest first, ties lowest id first; never one of -inf."""
        row = _row(logits)
        ensure(n >= 1, "at least one token is wanted")
        ids = np.empty(min(n, row.size), dtype=np.int64)
        found: int = self._library.most_likely(row.ctypes.data, row.size, n, ids.ctypes.data)
        return ids[:found]

    def mass(self, logits: NDArray[np.float32], highest: float, temperature: float) -> float:
        """The sum of exp((logit - highest) / temperature), up to `verify.scan.MASS_ERROR` of it."""
        row = _row(logits)
        mass: float = self._library.mass(row.ctypes.data, row.size, highest, inverse_temperature(temperature))
        return mass

    def racers(self, law: Law, key: int) -> NDArray[np.int64]:
        """The entries of the support that rounding may let win, ascending: one, but for a tie."""
        row = _row(law.logits)
        ensure(0 <= law.top < row.size, "the likeliest token is in the support")
        ids = None if law.ids is None else np.ascontiguousarray(law.ids, dtype=np.int64)
        ensure(ids is None or ids.shape == row.shape, "each logit of a support has an id")
        indices = np.empty(row.size, dtype=np.int64)
        found: int = self._library.racers(
            row.ctypes.data,
            row.size,
            None if ids is None else ids.ctypes.data,
            law.top,
            law.temperature,
            inverse_temperature(law.temperature),
            key,
            indices.ctypes.data,
        )
        return indices[:found].copy()


def _row(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if logits.dtype != np.float32 or logits.ndim != 1:
        raise TypeError(f"a row of float32 logits is wanted, got {logits.dtype} {list(logits.shape)}")
    return np.ascontiguousarray(logits)
