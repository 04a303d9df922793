"""Matrices of floats -> int8 and int4 weights; what the numbers mean is in kernels/quantized.py.

The int4 grid of a group of 32 weights is that with the least square error, of a few which divide the group's
range into more or fewer levels. Weights of files that have 4 bits themselves in such groups (GGUF's Q4_0,
Q4_1, Q4_K) lie on one of these grids, and are found again all but exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.library import BLOCK
from specinfer.kernels.quantized import (
    GROUP,
    LEVELS,
    Int4Weight,
    Int8Weight,
    grouped,
    pack_levels,
    rotate,
)

# Levels that a group's range is divided into. Fewer than 15 meet the groups of 4-bit files that do not use
# every level; more cut off the end of the range, which pays where few weights lie there.
_SPANS: Final = (15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 15.5, 16.0, 16.5, 17.0)
_LEAST_SCALE: Final = 2.0**-24  # that float16 holds


def quantize_int8(parts: Iterable[Tensor]) -> Int8Weight:
    """A matrix given as parts [rows, inner] in float32, one scale per row."""
    values: list[Tensor] = []
    scales: list[Tensor] = []
    for part in parts:
        rotated = rotate(grouped(part)).flatten(1) / GROUP
        most = rotated.abs().amax(1)
        scale = (most / 127.0).clamp_(min=_LEAST_SCALE)
        values.append((rotated / scale[:, None]).round_().to(torch.int8))
        scales.append(scale)
    return Int8Weight(torch.cat(values), torch.cat(scales))


def quantize_int4(parts: Iterable[Tensor]) -> Int4Weight:
    """A matrix given as parts [rows, inner] in float32, each but the last of whole blocks of rows."""
    found = [_int4_blocks(F.pad(part, (0, 0, 0, -len(part) % BLOCK))) for part in parts]
    return Int4Weight(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))


def _int4_blocks(rows: Tensor) -> Int4Weight:
    """Whole blocks of rows."""
    groups = grouped(rows)
    blocks, per_row = len(rows) // BLOCK, groups.shape[1]
    # Groups as columns: what is computed per group then runs along rows of memory.
    x = groups.view(-1, GROUP).T.contiguous()
    low, high = x.amin(0).clamp_(max=0), x.amax(0).clamp_(min=0)
    scale, zero = _grid(low, high, _SPANS[0])
    least = _error(x, scale, zero)
    for span in _SPANS[1:]:
        other_scale, other_zero = _grid(low, high, span)
        error = _error(x, other_scale, other_zero)
        better = error < least
        least = torch.where(better, error, least)
        scale, zero = torch.where(better, other_scale, scale), torch.where(better, other_zero, zero)
    levels = _levels(x, scale, zero).to(torch.uint8).T.reshape(len(rows), per_row * GROUP)

    def by_blocks(of_groups: Tensor, dtype: torch.dtype) -> Tensor:
        return of_groups.view(blocks, BLOCK, per_row).transpose(1, 2).to(dtype).contiguous()

    return Int4Weight(pack_levels(levels), by_blocks(scale, torch.float16), by_blocks(zero * 16, torch.uint8))


def _grid(low: Tensor, high: Tensor, span: float) -> tuple[Tensor, Tensor]:
    """Scales, as float16 holds them, and zeros, in sixteenths, with `span` levels from `low` to `high`."""
    scale = ((high - low) / span).clamp_(_LEAST_SCALE, torch.finfo(torch.float16).max).half().float()
    return scale, (-16 * low / scale).round_().clamp_(0, 255) / 16


def _levels(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (x / scale).add_(zero).round_().clamp_(0, LEVELS - 1)


def _error(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The square error of each group, [groups]."""
    return _levels(x, scale, zero).sub_(zero).mul_(scale).sub_(x).square_().sum(0)
