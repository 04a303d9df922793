"""Matrices of small numbers times scales, as the shapes of these say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.models.quantized.scaled import scaled

BLOCK = (2, 3)


@dataclass
class Stored:
    """A tensor that could be in a file."""

    whole: Tensor
    path: Path = Path("model.safetensors")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read_rows(self, start: int, stop: int) -> Tensor:
        return self.whole[start:stop]


@pytest.mark.parametrize(
    ("shape", "block"),
    [((3, 2), BLOCK), ((5, 1), None), ((5, 2), None), ((1, 1), None)],
    ids=["blocks", "channels", "groups", "all"],
)
def test_zero_points_are_subtracted_whatever_shares_them(
    shape: tuple[int, int], block: tuple[int, int] | None
) -> None:
    torch.manual_seed(3)
    values, scales = torch.randint(-8, 8, (5, 6), dtype=torch.int8), torch.rand(shape)
    zeros = torch.randint(-3, 4, shape, dtype=torch.int8)
    high, wide = -(-5 // shape[0]), 6 // shape[1]

    def each(of: Tensor) -> Tensor:
        return of.float().repeat_interleave(high, 0)[:5].repeat_interleave(wide, 1)

    matrix = scaled("up.weight_scale", Stored(values), Stored(scales), block, Stored(zeros))
    want = (values.float() - each(zeros)) * each(scales)
    torch.testing.assert_close(torch.cat([matrix.read_rows(0, 3), matrix.read_rows(3, 5)]), want)
