"""The scans of a row of logits in native code; specinfer/kernels/cpu/sampling.cpp has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.verify.law import Law, inverse_temperature

_SIGN = 1 << 63  # a key is an unsigned 64-bit number, an op's argument a signed one


class NativeScan:
    """A `verify.scan.Scan` that reads a row once; `kernels.build.load_library` comes before it."""

    def __init__(self) -> None:
        ops = torch.ops.specinfer
        self._most_likely: Callable[[Tensor, int], Tensor] = ops.most_likely.default
        self._mass: Callable[[Tensor, float, float], float] = ops.mass.default
        self._racers: Callable[..., Tensor] = ops.racers.default

    def most_likely(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
        """The ids of the n >= 1 largest logits, largest first, ties lowest id first; never one of -inf."""
        ids: NDArray[np.int64] = self._most_likely(torch.from_numpy(logits), n).numpy()
        return ids

    def mass(self, logits: NDArray[np.float32], highest: float, temperature: float) -> float:
        """The sum of exp((logit - highest) / temperature), up to `verify.scan.MASS_ERROR` of it."""
        return self._mass(torch.from_numpy(logits), highest, inverse_temperature(temperature))

    def racers(self, law: Law, key: int) -> NDArray[np.int64]:
        """The entries of the support that rounding may let win, ascending: one, but for a tie."""
        indices: NDArray[np.int64] = self._racers(
            torch.from_numpy(law.logits),
            None if law.ids is None else torch.from_numpy(law.ids),
            law.top,
            law.temperature,
            inverse_temperature(law.temperature),
            (key ^ _SIGN) - _SIGN,
        ).numpy()
        return indices
