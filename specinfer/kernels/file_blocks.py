"""Matrices of GGUF blocks in their own precision, and the PyTorch twin of cpu/blocks_product.cpp.

A group of 32 elements of a row is scale * step * level - min * min_step. Scales and mins are the file's
float16 values, steps are integers: per group in Q4_K and Q5_K, per half group in Q6_K. So no number of the
file is rounded, and the scale of a group, a product of 17 bits, is exact in float32.

Rows are quantized in groups of 32 to int8, as for int4. A group's products are added as integers; two float
operations follow in a fixed order, so the twin and the native products of every CPU give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.layout import (
    GROUP,
    BlocksWeight,
    in_huge_pages,
    pack_levels,
    padded,
    unpack_levels,
)
from specinfer.kernels.library import Library
from specinfer.kernels.structures import BLOCK, num_blocks

# Bytes of a group of a row, as read from a file's blocks: levels, scale, a step for each half, min, its step.
ROW_BYTES: Final = GROUP + 2 + 2 + 2 + 1
_SCALE, _STEPS, _MIN, _MIN_STEP = GROUP, GROUP + 2, GROUP + 4, GROUP + 6
_OFFSET: Final = 128  # offset of stored steps, and of 8-bit levels
SPAN: Final = 8  # groups that share a scale in blocks of 256


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Layout of blocks; a matrix with several forms uses one that can represent all of them."""

    bits: Literal[4, 8]  # per level
    span: int  # groups that share a scale, and a min: 1 or SPAN
    steps: bool  # some steps differ from 1
    mins: bool

    def __or__(self, other: BlockForm) -> BlockForm:
        return BlockForm(
            8 if 8 in (self.bits, other.bits) else 4,
            min(self.span, other.span),
            self.steps or other.steps,
            self.mins or other.mins,
        )


def empty_blocks(channels: int, inner: int, form: BlockForm, library: Library | None = None) -> BlocksWeight:
    """Uninitialized memory for a matrix of blocks."""
    blocks, groups = num_blocks(channels), padded(inner) // GROUP
    halves, spans = (1 if form.bits == 4 else 2), -(-groups // form.span)
    words = (groups, 4, BLOCK, 4) if form.bits == 4 else (groups * GROUP // 4, BLOCK, 4)

    def memory(dtype: torch.dtype, *sizes: int) -> Tensor:
        return in_huge_pages(library, torch.empty(blocks, *sizes, dtype=dtype))

    return BlocksWeight(
        memory(torch.uint8, *words),
        memory(torch.float16, spans, BLOCK),
        memory(torch.uint8, groups * halves if form.steps else 1, BLOCK),
        memory(torch.float16, spans if form.mins else 1, BLOCK),
        memory(torch.uint8, groups if form.mins else 1, BLOCK),
    )


def blocks_bytes(channels: int, inner: int, form: BlockForm) -> int:
    """The bytes of a matrix of blocks."""
    groups = padded(inner) // GROUP
    halves, spans = (1 if form.bits == 4 else 2), -(-groups // form.span)
    row = groups * GROUP * form.bits // 8 + 2 * spans
    row += groups * halves if form.steps else 1
    row += groups + 2 * spans if form.mins else 3
    return num_blocks(channels) * BLOCK * row


def block_rows(
    levels: Tensor,
    scales: Tensor,
    steps: Tensor | None = None,
    mins: Tensor | None = None,
    min_steps: Tensor | None = None,
) -> Tensor:
    """Rows of blocks as uint8 [rows, groups, ROW_BYTES], independent of the final form.

    Levels are int8 [rows, groups, GROUP]; scales and mins float16, min steps uint8, all [rows, groups];
    steps int8 [rows, groups, 2]. None: steps of 1, and no mins.
    """
    found = torch.zeros(*scales.shape, ROW_BYTES, dtype=torch.uint8)
    found[..., :GROUP] = levels.view(torch.uint8)
    found[..., _SCALE:_STEPS] = scales[..., None].contiguous().view(torch.uint8)
    found[..., _STEPS:_MIN] = 1 if steps is None else steps.view(torch.uint8)
    if mins is not None and min_steps is not None:
        found[..., _MIN:_MIN_STEP] = mins[..., None].contiguous().view(torch.uint8)
        found[..., _MIN_STEP] = min_steps
    return found


def lay_out_blocks(rows: Tensor, form: BlockForm) -> BlocksWeight:
    """Convert rows from `block_rows` to a form that can represent them, padded with zeros to whole blocks."""
    missing = -len(rows) % BLOCK
    rows = F.pad(rows, (0, 0, 0, 0, 0, missing))
    count, groups = len(rows) // BLOCK, rows.shape[1]

    def by_blocks(of_rows: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
        """[rows, entries, bytes] -> [blocks, entries, BLOCK] of that type."""
        entries = of_rows.contiguous().view(dtype).squeeze(2)
        return entries.view(count, BLOCK, -1).transpose(1, 2).contiguous()

    levels = rows[..., :GROUP].reshape(len(rows), groups * GROUP)
    spans = slice(None, None, form.span)
    if form.bits == 4:
        words, steps = pack_levels(levels), rows[..., _STEPS : _STEPS + 1]
    else:
        words = (levels ^ _OFFSET).view(count, BLOCK, groups * GROUP // 4, 4).transpose(1, 2).contiguous()
        steps = rows[..., _STEPS:_MIN].reshape(len(rows), groups * 2, 1)
    if not form.steps:
        steps = steps[:, :1] * 0 + 1
    mins, min_steps = rows[:, spans, _MIN:_MIN_STEP], rows[..., _MIN_STEP:]
    if not form.mins:
        mins, min_steps = mins[:, :1], min_steps[:, :1]
    return BlocksWeight(
        words,
        by_blocks(rows[:, spans, _SCALE:_STEPS], torch.float16),
        by_blocks(steps ^ _OFFSET),
        by_blocks(mins, torch.float16),
        by_blocks(min_steps),
    )


def blocks_sums(weight: BlocksWeight, groups: range) -> Callable[[Tensor], Tensor]:
    """Sums over some groups of a matrix of blocks, in order: a PartSum."""

    def add_up(x: Tensor) -> Tensor:
        values_RGI, scales_RG = blocks_inputs(x)
        of_mins_RG = -values_RGI.sum(2) * scales_RG
        total_RC = torch.zeros(len(x), weight.scales.shape[0] * BLOCK)
        for own, g in enumerate(groups):
            of_channels_C = weight.scales[:, g // weight.span].reshape(-1).float()
            if weight.bits == 4:
                sums_RC = F.linear(values_RGI[:, own], unpack_levels(weight.levels[:, g]).float()) * 16.0
                of_channels_C = of_channels_C * 0.0625
                if weight.has_steps:
                    of_channels_C = of_channels_C * _steps(weight, g)
            else:
                sums_RC = _sums_of_halves(weight, g, values_RGI[:, own])
            total_RC += sums_RC * (of_channels_C * scales_RG[:, own : own + 1])
            if weight.has_mins:
                min_C = weight.mins[:, g // weight.span].reshape(-1).float()
                min_C = min_C * weight.min_steps[:, g].reshape(-1).float()
                total_RC += min_C * of_mins_RG[:, own : own + 1]
        return total_RC

    return add_up


def blocks_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, inner] as integers [rows, groups, GROUP], and their scales [rows, groups]; both float32."""
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), padded(x.shape[1]) // GROUP, GROUP)
    highest = groups.abs().amax(2, keepdim=True)
    # `127.0 / highest` would be 127 times the reciprocal, and rounded twice.
    inverse = torch.where(highest < 1e-30, 0.0, torch.tensor(127.0).div(highest))
    return (groups * inverse).round(), highest.squeeze(2) / 127.0


def one_form(forms: Sequence[BlockForm]) -> BlockForm:
    """The form that can represent matrices of all these forms."""
    return reduce(BlockForm.__or__, forms)


def _sums_of_halves(weight: BlocksWeight, g: int, values_RI: Tensor) -> Tensor:
    """The sums of a group, each half times its step, rounded to float32."""
    per, half = GROUP // 4, GROUP // 2
    words = (weight.levels[:, g * per : (g + 1) * per] ^ _OFFSET).view(torch.int8)  # [blocks, 8, BLOCK, 4]
    levels_CI = words.transpose(1, 2).reshape(-1, GROUP).float()
    total = torch.zeros(len(values_RI), len(levels_CI), dtype=torch.float64)
    for n in range(2):
        part = slice(n * half, (n + 1) * half)
        sums_RC = F.linear(values_RI[:, part], levels_CI[:, part])
        total += sums_RC.double() * (_steps(weight, 2 * g + n) if weight.has_steps else 1.0)
    return total.float()


def _steps(weight: BlocksWeight, number: int) -> Tensor:
    return weight.steps[:, number].reshape(-1).float() - _OFFSET
