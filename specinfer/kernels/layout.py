"""Memory and file layout of matrices: blocks of 16 rows, as in cpu/product.h; and floats in that layout.

A 4-byte word holds adjacent elements of a row: one float32, two bfloat16 or four int8. A block contains the
first word of each of its 16 rows, then the second, and so on. int4 weights are packed by groups instead
(`pack_levels`). Padding rows and elements are zeros.

kernels/quantized.py defines the meaning of int8 and int4. cpu/quantizer.cpp computes the bits of
`quantize_int8` and `quantize_int4` from files. These functions also take values that are not finite, and
matrices that are computed before they are quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.library import Library
from specinfer.kernels.structures import BLOCK, num_blocks, padded_inner

GROUP: Final = 32  # inner elements that are rotated together, or share a scale; inner sizes are padded to it
SPAN: Final = 8  # groups that share a scale in blocks of 256
INT4_BYTES: Final = GROUP + 3  # per group of a row: its levels, a float16 scale, a zero in sixteenths
OFFSET: Final = 128  # offset of stored int8 values, of 8-bit levels and of steps
_ROW_AXES: Final = {2: 1, 3: 2, 4: 2, 5: 3}  # axis of a block's rows in a tensor with this many dimensions
_ZEROS: Final = -0x7F7F7F80  # the offset in all four bytes of a word
LEVELS: Final = 16  # per int4 weight
_PAIRS: Final = torch.tensor([0, 2, 4], dtype=torch.uint8)  # lowest bits of the three pairs in six bits
# Levels that a group's range is divided into. Fewer than 15 match the groups of 4-bit files that do not use
# every level; more cut off the end of the range, which pays if few weights are there.
_SPANS: Final = (15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 15.5, 16.0, 16.5, 17.0)
_MIN_SCALE: Final = 2.0**-24  # smallest positive float16


class FloatTable(NamedTuple):
    """An unchanged tensor, in the dtype of the activations."""

    rows: Tensor


class FloatWeight(NamedTuple):
    """A matrix of a native product of floats."""

    values: Tensor  # [blocks, padded inner / n, BLOCK, n], n elements of float32 or bfloat16 in 4 bytes


class Int8Weight(NamedTuple):
    """A matrix rotated by H / 32, as scales * (values - 128)."""

    values: Tensor  # uint8 [blocks, padded inner / 4, BLOCK, 4], 1 .. 255
    scales: Tensor  # float32 [blocks, BLOCK]


class Int4Weight(NamedTuple):
    """A matrix as scales * (levels - zeros / 16)."""

    levels: Tensor  # uint8 [blocks, groups, 4, BLOCK, 4], two to a byte; see `pack_levels`
    scales: Tensor  # float16 [blocks, groups, BLOCK]
    zeros: Tensor  # uint8 [blocks, groups, BLOCK]


class BlocksWeight(NamedTuple):
    """A matrix of GGUF blocks (file_blocks.py).

    If all steps are 1, or there are no mins, the corresponding arrays have one entry per block of rows.
    """

    levels: Tensor  # uint8 [blocks, groups, bits, BLOCK, 4]; see `pack_levels`
    scales: Tensor  # float16 [blocks, spans, BLOCK]
    steps: Tensor  # uint8 [blocks, groups * n, BLOCK], step + 128; n is 1 for 4 bits, else 2
    mins: Tensor  # float16 [blocks, spans, BLOCK]
    min_steps: Tensor  # uint8 [blocks, groups, BLOCK]

    @property
    def bits(self) -> int:
        """Bits of a level: 4, 6 or 8."""
        return self.levels.shape[2]

    @property
    def groups(self) -> int:
        """Number of groups in a row."""
        return self.levels.shape[1]

    @property
    def span(self) -> int:
        """Groups that share a scale: 1 or SPAN."""
        return self.groups // self.scales.shape[1]

    @property
    def has_steps(self) -> bool:
        """True if each group has a step."""
        return self.steps.shape[1] == self.groups * (1 if self.bits == 4 else 2)

    @property
    def has_mins(self) -> bool:
        """True if each group has a min."""
        return self.min_steps.shape[1] == self.groups


Weight = FloatTable | FloatWeight | Int8Weight | Int4Weight | BlocksWeight


def in_huge_pages(library: Library | None, fresh: Tensor) -> Tensor:
    """Request large pages for `fresh`, memory that has not been written yet, and return it.

    The library makes the request; without one the memory is unchanged.
    """
    if library is not None:
        library.want_huge_pages(fresh.data_ptr(), fresh.nbytes)
    return fresh


def empty_floats(
    channels: int, inner: int, dtype: torch.dtype, library: Library | None = None
) -> FloatWeight:
    """Uninitialized memory for a float matrix."""
    count = 4 // dtype.itemsize
    words = padded_inner("float32" if dtype is torch.float32 else "bfloat16", inner) // count
    values = torch.empty(num_blocks(channels), words, BLOCK, count, dtype=dtype)
    return FloatWeight(in_huge_pages(library, values))


def empty_int8(channels: int, inner: int, library: Library | None = None) -> Int8Weight:
    """Uninitialized memory for an int8 matrix."""
    blocks, words = num_blocks(channels), padded_inner("int8", inner) // 4
    return Int8Weight(
        in_huge_pages(library, torch.empty(blocks, words, BLOCK, 4, dtype=torch.uint8)),
        torch.empty(blocks, BLOCK),
    )


def empty_int4(channels: int, inner: int, library: Library | None = None) -> Int4Weight:
    """Uninitialized memory for an int4 matrix."""
    blocks, groups = num_blocks(channels), padded(inner) // GROUP
    return Int4Weight(
        in_huge_pages(library, torch.empty(blocks, groups, 4, BLOCK, 4, dtype=torch.uint8)),
        in_huge_pages(library, torch.empty(blocks, groups, BLOCK, dtype=torch.float16)),
        in_huge_pages(library, torch.empty(blocks, groups, BLOCK, dtype=torch.uint8)),
    )


def int8_bytes(channels: int, inner: int) -> int:
    """The bytes of an int8 matrix."""
    return num_blocks(channels) * BLOCK * (padded_inner("int8", inner) + 4)


def int4_bytes(channels: int, inner: int) -> int:
    """The bytes of an int4 matrix."""
    return num_blocks(channels) * BLOCK * padded(inner) // GROUP * (GROUP // 2 + 3)


def padded(inner: int) -> int:
    """An inner size rounded up to whole groups."""
    return -(-inner // GROUP) * GROUP


def lay_out_floats(matrix: Tensor, into: FloatWeight) -> None:
    """Fill `into` with a matrix [channels, inner] of its dtype."""
    _lay_out(matrix, into.values)


def lay_out_int8(values: Tensor, scales: Tensor) -> Int8Weight:
    """Values -127 .. 127, int8 [channels, inner], and float32 scales [channels], as an Int8Weight."""
    weight = empty_int8(*values.shape)
    _lay_out(values, weight.values)
    weight.values.view(torch.int32).bitwise_xor_(_ZEROS)
    weight.scales.copy_(F.pad(scales, (0, -len(scales) % BLOCK)).view(-1, BLOCK))
    return weight


def int8_matrix(weight: Int8Weight, channels: int, inner: int) -> tuple[Tensor, Tensor]:
    """The inverse of `lay_out_int8`: int8 [channels, inner] and float32 [channels]."""
    values = (weight.values ^ OFFSET).view(torch.int8).transpose(1, 2).flatten(2).flatten(0, 1)
    return values[:channels, :inner].contiguous(), weight.scales.view(-1)[:channels]


def pack_levels(levels: Tensor, bits: int = 4) -> Tensor:
    """Pack levels, uint8 [blocks * BLOCK, inner], as [blocks, groups, bits, BLOCK, 4] of cpu/product.h.

    Those of 4 bits are 0 .. 15; those of 6 and 8 bits are signed, as bytes.
    """
    words = levels.view(-1, BLOCK, levels.shape[1] // GROUP, 8, 4)
    if bits == 4:
        packed = words[..., ::2, :] | words[..., 1::2, :] << 4
    elif bits == 6:
        fours = (words ^ 32).bitwise_and_(63).view(*words.shape[:3], 2, 4, 4)
        packed = (fours[..., :3, :] | (fours[..., 3:, :] >> _PAIRS[:, None] & 3) << 6).flatten(3, 4)
    else:
        packed = words ^ OFFSET
    return packed.permute(0, 2, 3, 1, 4).contiguous()


def int4_rows(levels: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Rows with groups scales * (levels - zeros), as uint8 [rows, groups, INT4_BYTES].

    Levels 0 .. 15 are uint8 [rows, inner], in whole groups; zeros 0 .. 15 are uint8 [rows, groups]; scales
    are [rows, groups], exact in float16. A group with a negative scale is stored with levels 15 - level.
    """
    rows, groups = scales.shape
    turned = (scales < 0)[..., None]
    levels = levels.view(rows, groups, GROUP)
    found = torch.empty(rows, groups, INT4_BYTES, dtype=torch.uint8)
    found[..., :GROUP] = torch.where(turned, 15 - levels, levels)
    found[..., GROUP : GROUP + 2] = scales.abs().half()[..., None].contiguous().view(torch.uint8)
    zeros = zeros[..., None]
    found[..., GROUP + 2 :] = torch.where(turned, 15 - zeros, zeros) * 16
    return found


def lay_out_int4(rows: Tensor) -> Int4Weight:
    """Convert rows from `int4_rows`, padded with zeros to whole blocks."""
    rows = F.pad(rows, (0, 0, 0, 0, 0, -len(rows) % BLOCK))
    by_blocks = rows.view(-1, BLOCK, *rows.shape[1:]).transpose(1, 2)
    scales = by_blocks[..., GROUP : GROUP + 2].contiguous().view(torch.float16).squeeze(3)
    return Int4Weight(
        pack_levels(rows[..., :GROUP].reshape(len(rows), -1)), scales, by_blocks[..., GROUP + 2].contiguous()
    )


def unpack_levels(levels: Tensor) -> Tensor:
    """The levels of one group of every block, [blocks, bits, BLOCK, 4], as int8 [blocks * BLOCK, GROUP]."""
    if levels.shape[1] == 4:
        words = torch.stack((levels & 15, levels >> 4), 2).flatten(1, 2)
    elif levels.shape[1] == 6:
        threes = levels.reshape(len(levels), 2, 3, *levels.shape[2:])
        fourth = (threes >> 6 << _PAIRS[:, None, None]).sum(2, keepdim=True, dtype=torch.uint8)
        words = (torch.cat((threes & 63, fourth), 2) - 32).flatten(1, 2)
    else:
        words = levels ^ OFFSET
    return words.transpose(1, 2).reshape(-1, GROUP).view(torch.int8)


def choose_rows(weight: Weight, ids: Sequence[int], into: Weight) -> None:
    """Fill `into`, of that many rows, with these rows of a matrix, in order."""
    fill = OFFSET if isinstance(weight, Int8Weight) else 0
    wanted, places = torch.tensor(ids, dtype=torch.int64), torch.arange(len(ids))
    for source, there in zip(weight, into, strict=True):
        axis = _ROW_AXES[source.dim()]
        by_rows, rows_there = source.movedim(axis, 1), there.movedim(axis, 1)
        rows_there[-1:] = fill if source.dtype == torch.uint8 else 0
        rows_there[places // BLOCK, places % BLOCK] = by_rows[wanted // BLOCK, wanted % BLOCK]


def cut(weight: Weight, rows: Sequence[range], columns: range, into: Weight) -> None:
    """Fill `into` with these ranges of rows of a matrix, concatenated, and a range of columns.

    Columns start and end at a group, or end with the matrix, since groups are rotated or have a scale. Values
    are unchanged, including the scales of whole rows.
    """
    if columns.start % GROUP:
        raise ValueError(f"columns from {columns.start} on; allowed: multiples of {GROUP}")
    if isinstance(weight, FloatTable) and isinstance(into, FloatTable):
        within = slice(columns.start, columns.stop)
        into.rows.copy_(torch.cat([weight.rows[one.start : one.stop, within] for one in rows]))
        return
    part, there = _columns(weight, columns), _columns(into, range(len(columns)))
    for whole, filled in zip(into, there, strict=True):
        if whole is not filled:
            whole[:, filled.shape[1] :] = OFFSET if isinstance(into, Int8Weight) else 0
    ends = [one.stop // BLOCK * BLOCK for one in rows]
    ends[-1] = rows[-1].stop if num_blocks(rows[-1].stop) == len(weight[0]) else ends[-1]
    if all(one.start % BLOCK == 0 and one.stop == end for one, end in zip(rows, ends, strict=True)):
        done = 0
        for one in rows:
            blocks = slice(one.start // BLOCK, num_blocks(one.stop))
            count = blocks.stop - blocks.start
            for source, target in zip(part, there, strict=True):
                target[done : done + count] = source[blocks]
            done += count
    else:
        choose_rows(part, [row for one in rows for row in one], there)


def _columns(weight: Weight, columns: range) -> Weight:
    """Views of these columns of a matrix in blocks; scales of rows are complete."""
    per = GROUP if isinstance(weight, Int4Weight) else weight[0].shape[-1]
    # A partial group has values in all its elements once it is rotated.
    end = padded(columns.stop) if isinstance(weight, Int8Weight) else columns.stop
    words = slice(columns.start // per, -(-end // per))
    return type(weight)(*(one if one.dim() == 2 else one[:, words] for one in weight))


def _lay_out(matrix: Tensor, into: Tensor) -> None:
    """Fill `into` [blocks, words, BLOCK, elements of a word] with a matrix [channels, inner]."""
    blocks, words, _, count = into.shape
    rows, inner = matrix.shape
    if (missing := (0, words * count - inner, 0, blocks * BLOCK - rows)) != (0, 0, 0, 0):
        matrix = F.pad(matrix, missing)
    by_words = matrix.contiguous().view(torch.int32).view(blocks, BLOCK, words)
    into.view(torch.int32).view(blocks, words, BLOCK).copy_(by_words.transpose(1, 2))


def grouped(x: Tensor) -> Tensor:
    """x [rows, inner] as float32 [rows, groups, GROUP], padded with zeros."""
    return F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), padded(x.shape[1]) // GROUP, GROUP)


def rotate(groups: Tensor) -> Tensor:
    """The last dimension, of 32, times the Hadamard matrix H; five rounds of sums and differences."""
    # With groups as columns, sums run along contiguous memory, which halves the time of quantizing to int8.
    columns = groups.reshape(-1, GROUP).T.contiguous()
    for width in (16, 8, 4, 2, 1):
        pairs = (GROUP // (2 * width), 2, width, columns.shape[1])
        first, second = columns.view(pairs).unbind(1)
        columns = torch.empty_like(columns)
        sums, differences = columns.view(pairs).unbind(1)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
    return columns.T.reshape(groups.shape)


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
