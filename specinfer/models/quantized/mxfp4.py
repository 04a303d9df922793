"""MXFP4 (gpt-oss): 4-bit floats, two per byte, with a power of two for every 32.

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
_BIAS: Final = 127  # exponent bias
_PER_GROUP: Final = 16  # bytes


def mxfp4(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The experts' matrices by name: NAME.weight from NAME_blocks and NAME_scales, concatenated by rows.

    Raises ModelFileError if the tensors' shapes do not match.
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
        """Rows start..stop, float32; bfloat16 can represent the values, too."""
        octets = self._blocks.read_rows(start, stop)
        powers = self._scales.read_rows(start, stop).int() - _BIAS
        values = _VALUES[torch.stack((octets & 15, octets >> 4), 3).int()].flatten(2)
        return torch.ldexp(values, powers[..., None]).flatten(1)
