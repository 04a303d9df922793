"""MXFP4 as gpt-oss has it: 4-bit floats, two a byte, 32 of which share a power of two.

Source: the OCP Microscaling Formats specification, and transformers' mxfp4 integration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.models.fields import Fields
from specinfer.models.quantized.pieces import Pieces, StoredTensor

_HALF: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = torch.tensor([*_HALF, *(-value for value in _HALF)])
_BYTES: Final = (torch.uint8,)
_BIAS: Final = 127  # of exponents
_PER_GROUP: Final = 16  # bytes


def mxfp4(said: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The experts of such a model: NAME.weight of NAME_blocks and NAME_scales, one expert below the other.

    Raises ModelFileError where tensors do not fit one another.
    """
    found = dict[str, StoredTensor]()
    for stem in pieces.stems("_blocks"):
        blocks = pieces.take(f"{stem}_blocks", _BYTES, (None, None, None, _PER_GROUP))
        scales = pieces.take(f"{stem}_scales", _BYTES, blocks.shape[:3])
        found[f"{stem}.weight"] = MicroscaledMatrix(blocks.stacked(), scales.stacked())
    return found


class MicroscaledMatrix:
    """A StoredTensor [rows, inner] of bytes [rows, groups, 16] and exponents [rows, groups]."""

    dtype: torch.dtype | None = None

    def __init__(self, blocks: StoredTensor, scales: StoredTensor) -> None:
        rows, groups, _ = blocks.shape
        self.path: Path = blocks.path
        self.shape: tuple[int, ...] = (rows, groups * 2 * _PER_GROUP)
        self._blocks, self._scales = blocks, scales

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, float32; the values are bfloat16's, too."""
        octets = self._blocks.read_rows(start, stop)
        powers = self._scales.read_rows(start, stop).int() - _BIAS
        values = _VALUES[torch.stack((octets & 15, octets >> 4), 3).int()].flatten(2)
        return torch.ldexp(values, powers[..., None]).flatten(1)
