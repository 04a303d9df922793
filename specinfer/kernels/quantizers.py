"""Quantizers: floats as int8 and int4 weights, as kernels/quantized.py defines them.

cpu/quantizer.cpp computes the same bits from files. This one takes values that are not finite, too, and every
matrix that is computed before it is quantized.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.layout import GROUP, Int4Weight, Int8Weight, lay_out_int8, pack_levels
from specinfer.kernels.quantized import grouped, rotate
from specinfer.kernels.structures import BLOCK

LEVELS: Final = 16  # per int4 weight
# Levels that a group's range is divided into. Fewer than 15 match the groups of 4-bit files that do not use
# every level; more cut off the end of the range, which pays if few weights are there.
_SPANS: Final = (15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 15.5, 16.0, 16.5, 17.0)
_MIN_SCALE: Final = 2.0**-24  # smallest positive float16


def quantize_int8(rows: Tensor) -> Int8Weight:
    """Quantize rows of a float32 matrix [rows, inner], one scale each, padded with zeros to whole blocks."""
    rotated = rotate(grouped(rows)).flatten(1) / GROUP
    scales = (rotated.abs().amax(1) / 127.0).clamp_(min=_MIN_SCALE)
    return lay_out_int8((rotated / scales[:, None]).round_().to(torch.int8), scales)


def quantize_int4(rows: Tensor) -> Int4Weight:
    """Quantize rows of a float32 matrix [rows, inner], padded with zeros to whole blocks.

    The grid of a group of 32 weights is the one with the least square error among a few that divide the
    group's range into more or fewer levels. Weights from files with such 4-bit groups (GGUF's Q4_0, Q4_1,
    Q4_K) lie on one of these grids, and are recovered almost exactly.
    """
    return _int4_blocks(F.pad(rows, (0, 0, 0, -len(rows) % BLOCK)))


def _int4_blocks(rows: Tensor) -> Int4Weight:
    """Quantize whole blocks of rows."""
    levels, scale, zero = int4_levels(rows)

    def by_blocks(of_groups: Tensor, dtype: torch.dtype) -> Tensor:
        return of_groups.view(-1, BLOCK, of_groups.shape[1]).transpose(1, 2).to(dtype).contiguous()

    return Int4Weight(pack_levels(levels), by_blocks(scale, torch.float16), by_blocks(zero * 16, torch.uint8))


def int4_levels(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, uint8 [rows, padded inner], and groups' scales and zeros, float32 [rows, groups]."""
    groups = grouped(rows)
    shape = groups.shape[:2]
    # Groups as columns: computations per group then run along contiguous memory.
    x = groups.view(-1, GROUP).T.contiguous()
    low, high = x.amin(0).clamp_(max=0), x.amax(0).clamp_(min=0)
    scale, zero = _grid(low, high, _SPANS[0])
    best_error = _error(x, scale, zero)
    for span in _SPANS[1:]:
        other_scale, other_zero = _grid(low, high, span)
        error = _error(x, other_scale, other_zero)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        scale, zero = torch.where(better, other_scale, scale), torch.where(better, other_zero, zero)
    levels = _levels(x, scale, zero).to(torch.uint8).T.reshape(len(rows), -1)
    return levels, scale.view(shape), zero.view(shape)


def _grid(low: Tensor, high: Tensor, span: float) -> tuple[Tensor, Tensor]:
    """Scales, rounded to float16, and zeros, in sixteenths, with `span` levels from `low` to `high`."""
    scale = ((high - low) / span).clamp_(_MIN_SCALE, torch.finfo(torch.float16).max).half().float()
    return scale, (-16 * low / scale).round_().clamp_(0, 255) / 16


def _levels(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (x / scale).add_(zero).round_().clamp_(0, LEVELS - 1)


def _error(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The square error of each group, [groups]; the halves of a group are added one by one.

    The order of PyTorch's sum depends on the CPU and on the number of groups.
    """
    squares = _levels(x, scale, zero).sub_(zero).mul_(scale).sub_(x).square_().view(2, GROUP // 2, -1)
    halves = squares[:, 0]
    for i in range(1, GROUP // 2):
        halves = halves + squares[:, i]
    return halves[0] + halves[1]
