"""A pass of a model in flight: it is asked for answers, and keeps its logits to itself.

What most callers want of a row is one token, the model's own choice there. A row of logits is half a megabyte
at a large vocabulary; so it is looked at where it lies, and comes out only for those who work on all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import LogitsError
from specinfer.sampling_params import SamplingParams
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.scan import Scan
from specinfer.verify.target_law import target_law


class Flight:
    """The rows of one pass that want logits; each is known by its place among them."""

    __slots__ = ("_logits", "scan", "vocab")

    def __init__(self, logits_RV: Tensor, scan: Scan) -> None:
        self.vocab = int(logits_RV.shape[1])
        self.scan = scan  # for those who work on a row
        self._logits = LogitRows(logits_RV)

    def row(self, row: int) -> NDArray[np.float32]:
        """One row of logits, [vocab]; not to be written to."""
        return self._logits[row]

    def rows(self, first: int, behind: int) -> Sequence[NDArray[np.float32]]:
        """The rows from `first` on, before `behind`."""
        return self._logits[first:behind]

    def choices(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """The model's own choice at each row; -1 where its largest logit is not finite.

        A choice is `coupled_choice` of the law that the row's parameters make of it, at the absolute position
        of the token that is chosen.
        """
        return [self._choice(*asked) for asked in zip(rows, params, seeds, positions, strict=True)]

    def _choice(self, row: int, params: SamplingParams, seed: int, position: int) -> int:
        try:
            law = target_law(self._logits[row], params, self.scan)
        except LogitsError:
            return -1
        return coupled_choice(law, seed, position, self.scan)


class LogitRows(Sequence[NDArray[np.float32]]):
    """The logits of a pass, [R, vocab]: a row is made float32 in host memory when somebody looks at it.

    A walk down a tree looks at few of them, and a row of a large vocabulary is half a megabyte.
    """

    __slots__ = ("_rows_RV",)

    def __init__(self, logits_RV: Tensor) -> None:
        logits_RV = logits_RV.cpu()  # from a GPU all at once: a transfer waits for the pass
        is_bfloat16 = logits_RV.dtype is torch.bfloat16  # NumPy has none: its bits, then
        self._rows_RV: NDArray[Any] = (logits_RV.view(torch.uint16) if is_bfloat16 else logits_RV).numpy()

    def __len__(self) -> int:
        return len(self._rows_RV)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.float32]: ...

    @overload
    def __getitem__(self, index: slice) -> LogitRows: ...

    def __getitem__(self, index: int | slice) -> NDArray[np.float32] | LogitRows:
        chosen = self._rows_RV[index]
        if isinstance(index, slice):
            part = object.__new__(LogitRows)
            part._rows_RV = chosen
            return part
        if chosen.dtype == np.uint16:  # the upper half of a float32
            bits: NDArray[np.uint32] = np.left_shift(chosen, 16, dtype=np.uint32)
            return bits.view(np.float32)
        row: NDArray[np.float32] = chosen.astype(np.float32, copy=False)
        return row
