"""Matrices of small numbers times scales, as the shapes of these say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specinfer.models.quantized.scaled import scaled
from specinfer.models.safetensors import read_entries

BLOCK = (2, 3)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((3, 2), BLOCK), ((5, 1), None), ((5, 2), None), ((1, 1), None)],
    ids=["blocks", "channels", "groups", "all"],
)
def test_zero_points_are_subtracted_whatever_shares_them(
    shape: tuple[int, int], block: tuple[int, int] | None, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    values, scales = torch.randint(-8, 8, (5, 6), dtype=torch.int8), torch.rand(shape)
    zeros = torch.randint(-3, 4, shape, dtype=torch.int8)
    high, wide = -(-5 // shape[0]), 6 // shape[1]

    def each(of: Tensor) -> Tensor:
        return of.float().repeat_interleave(high, 0)[:5].repeat_interleave(wide, 1)

    save_file({"values": values, "scales": scales, "zeros": zeros}, tmp_path / "m")
    there = read_entries([tmp_path / "m"], {"I8": torch.int8, "F32": torch.float32})
    matrix = scaled("up.weight_scale", there["values"], there["scales"], block, there["zeros"])
    want = (values.float() - each(zeros)) * each(scales)
    torch.testing.assert_close(torch.cat([matrix.read_rows(0, 3), matrix.read_rows(3, 5)]), want)
