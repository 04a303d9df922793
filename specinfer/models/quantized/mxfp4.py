"""MXFP4 as gpt-oss has it: 4-bit floats, two a byte, 32 of which share a power of two.

Source: the OCP Microscaling Formats specification, and transformers' mxfp4 integration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.models.fields import Fields
from specinfer.models.quantized.pieces import LastFew, Pieces, StoredTensor

_HALF: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = torch.tensor([*_HALF, *(-value for value in _HALF)])
_BYTES: Final = (torch.uint8,)
_BIAS: Final = 127  # of exponents
_PER_GROUP: Final = 16  # bytes
_KEPT: Final = 2  # experts that are in memory: one for each thread that reads


def mxfp4(said: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The experts of such a model: NAME.weight of NAME_blocks and NAME_scales, one expert below the other.

    Raises ModelFileError where tensors do not fit one another.
    """
    found, last = dict[str, StoredTensor](), LastFew[_Expert](_KEPT)
    for stem in pieces.stems("_blocks"):
        blocks = pieces.take(f"{stem}_blocks", _BYTES, (None, None, None, _PER_GROUP))
        scales = pieces.take(f"{stem}_scales", _BYTES, blocks.shape[:3])
        found[f"{stem}.weight"] = StackedMicroscaled(blocks, scales, last)
    return found


class StackedMicroscaled:
    """Matrices of all experts, one below the other: a StoredTensor [experts * rows, inner]."""

    dtype: torch.dtype | None = None

    def __init__(self, blocks: StoredTensor, scales: StoredTensor, last: LastFew[_Expert]) -> None:
        """`last` has the experts of a folder that are in memory."""
        experts, self._rows, groups, _ = blocks.shape
        self.path: Path = blocks.path
        self.shape: tuple[int, ...] = (experts * self._rows, groups * 2 * _PER_GROUP)
        self._blocks, self._scales = blocks, scales
        self._last = last

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, float32; the values are bfloat16's, too."""
        parts = list[Tensor]()
        for number in range(start // self._rows, -(-stop // self._rows)):
            first = number * self._rows
            expert, within = self._expert(number), slice(max(start - first, 0), stop - first)
            octets = expert.octets[within]
            values = _VALUES[torch.stack((octets & 15, octets >> 4), 3).int()].flatten(2)
            parts.append(torch.ldexp(values, expert.powers[within][..., None]).flatten(1))
            if stop >= first + self._rows:
                self._last.drop((id(self), number))
        return torch.cat(parts) if parts else torch.empty(0, self.shape[1])

    def _expert(self, number: int) -> _Expert:
        def read() -> _Expert:
            octets = self._blocks.read_rows(number, number + 1)[0]
            return _Expert(octets, self._scales.read_rows(number, number + 1)[0].int() - _BIAS)

        return self._last.get((id(self), number), read)


class _Expert(NamedTuple):
    octets: Tensor  # uint8 [rows, groups, 16]
    powers: Tensor  # int32 [rows, groups], of two
