"""Matrices in blocks of 16 rows: where each element lies, and how near quantized ones come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specinfer.kernels.layout import (
    GROUP,
    FloatWeight,
    Int4Weight,
    Int8Weight,
    choose_rows,
    cut,
    empty_floats,
    empty_int4,
    empty_int8,
    int8_matrix,
    lay_out_floats,
    lay_out_int8,
    quantize_int4,
    quantize_int8,
    rotate,
    unpack_levels,
)


def element(blocks: Tensor, row: int, column: int) -> float:
    """Return the position of a matrix element in cpu/product.h's layout."""
    per_word = blocks.shape[3]
    return float(blocks[row // 16, column // per_word, row % 16, column % per_word])


def as_matrix(blocks: Tensor) -> Tensor:
    """All elements, [blocks * 16, padded inner], found one by one."""
    rows, columns = len(blocks) * 16, blocks.shape[1] * blocks.shape[3]
    return torch.tensor([[element(blocks, r, c) for c in range(columns)] for r in range(rows)])


def floats(channels: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, FloatWeight]:
    matrix = torch.randn(channels, inner, generator=torch.Generator().manual_seed(channels)).to(dtype)
    laid_out = empty_floats(channels, inner, dtype)
    lay_out_floats(matrix, laid_out)
    return matrix, laid_out


def int8(channels: int, inner: int) -> tuple[Tensor, Tensor, Int8Weight]:
    generator = torch.Generator().manual_seed(channels)
    values = torch.randint(-127, 128, (channels, inner), generator=generator).to(torch.int8)
    scales = torch.rand(channels, generator=generator)
    return values, scales, lay_out_int8(values, scales)


@pytest.mark.parametrize("ids", [[], [5], [*range(20)], [32, 0, 19, 19, *range(14)]], ids=len)
def test_chosen_rows_are_those_rows_laid_out(ids: list[int]) -> None:
    values, scales, whole = int8(33, 70)
    some = empty_int8(len(ids), 70)
    choose_rows(whole, ids, some)
    for found, want in zip(some, lay_out_int8(values[ids], scales[ids]), strict=True):
        assert torch.equal(found, want)
    matrix, laid_out = floats(33, 70, torch.bfloat16)
    chosen, wanted = (empty_floats(len(ids), 70, torch.bfloat16) for _ in range(2))
    choose_rows(laid_out, ids, chosen)
    lay_out_floats(matrix[ids], wanted)
    assert torch.equal(chosen.values, wanted.values)


def test_ranges_of_a_matrix_are_a_matrix_of_their_own() -> None:
    for rows, columns in (
        ([range(0, 16), range(32, 64)], range(64, 128)),  # whole blocks
        ([range(16, 32), range(64, 70)], range(32, 128)),  # to the matrix's end
        ([range(16, 24)], range(0, 96)),
        ([range(3, 20), range(40, 41)], range(96, 128)),
    ):
        values, scales, whole = int8(70, 128)
        chosen = torch.tensor([row for one in rows for row in one])
        part = empty_int8(len(chosen), len(columns))
        part.values.fill_(7)
        cut(whole, rows, columns, part)
        wanted = values[chosen][:, columns.start : columns.stop]
        found, found_scales = int8_matrix(part, len(chosen), len(columns))
        assert torch.equal(found, wanted), rows
        assert torch.equal(found_scales, scales[chosen]), rows
        behind = as_matrix(part.values)[:, len(columns) :]
        assert behind.eq(128).all(), rows


def test_ranges_of_int4_keep_levels_scales_and_zeros() -> None:
    matrix = torch.randn(70, 102, generator=torch.Generator().manual_seed(0))
    whole = quantize_int4(matrix)
    for rows in ([range(16, 32), range(64, 70)], [range(3, 20), range(40, 41)]):
        for columns in (range(32, 64), range(96, 102)):
            wanted = torch.cat([matrix[one.start : one.stop] for one in rows])
            own = quantize_int4(wanted[:, columns.start : columns.stop])
            part = empty_int4(len(wanted), len(columns))
            cut(whole, rows, columns, part)
            for row in range(len(wanted)):
                for here, there in zip(part, own, strict=True):
                    axis = {3: 2, 5: 3}[here.dim()]
                    found, found_own = (one[row // 16].select(axis - 1, row % 16) for one in (here, there))
                    assert torch.equal(found, found_own)


def int4_values(weight: Int4Weight) -> Tensor:
    """The weights it stands for, [blocks * 16, padded inner]."""
    columns = [
        (unpack_levels(weight.levels[:, g]) - weight.zeros[:, g].reshape(-1, 1) / 16)
        * weight.scales[:, g].reshape(-1, 1).float()
        for g in range(weight.scales.shape[1])
    ]
    return torch.cat(columns, 1)


def test_int8_is_within_half_a_step_of_the_turned_weights() -> None:
    w = torch.randn(20, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 20)[:, None]
    values, scales = int8_matrix(quantize_int8(w), 20, 128)
    rotated = rotate(torch.nn.functional.pad(w, (0, 28)).view(20, 4, GROUP)).flatten(1) / GROUP
    assert values.abs().amax(1).tolist() == [127] * 20
    error = (values * scales[:, None] - rotated).abs().amax(1)
    assert (error <= 0.501 * scales).all()


@pytest.mark.parametrize("span", [15, 12, 10])
def test_int4_finds_the_grid_that_weights_lie_on(span: int) -> None:
    """Groups that use `span` + 1 of 16 levels with a zero among them, as those of 4-bit files do."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, span + 1, (16, 4, GROUP), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, span
    steps = 2.0 ** -torch.randint(4, 9, (16, 4, 1), generator=generator)
    w = ((levels - 6.25) * steps).view(16, 4 * GROUP)
    torch.testing.assert_close(int4_values(quantize_int4(w)), w, rtol=2**-9, atol=0)
