"""Converts GGUF blocks to rows of levels, scales and mins (kernels/file_blocks.py) without rounding.

Types whose numbers have no such form are dequantized and rounded to 8 bits. Source: the layouts of ggml's
quantized types, as the gguf package dequantizes them.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.file_blocks import NOT_FINITE, ODD_LEVEL, BlockForm, block_rows
from specinfer.kernels.layout import GROUP, SPAN, int4_levels

_MAX_LEVEL: Final = 127  # its negative is the minimum that all CPUs' products support
_HALVES: Final = (slice(GROUP, GROUP + 2), slice(GROUP + 4, GROUP + 6))  # bytes of a row's scale and min
# The numbers that the four bits of an IQ4_NL or IQ4_XS weight, and of an MXFP4 weight, stand for.
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_EQUAL_STEPS: Final = ("IQ1_S", "IQ3_S", "TQ1_0", "TQ2_0")  # 3 or 16 numbers a group, at equal distances
_MXFP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class FileBlocks(NamedTuple):
    """A type of blocks that runs in its own precision."""

    form: BlockForm
    # Converts bytes of rows, uint8 [rows, blocks, bytes of a block], to the format of `block_rows`.
    rows: Callable[[Tensor], Tensor]


def check_rows(name: str, rows: Tensor) -> None:
    """Raise ModelFileError for a level of -128, which no converter writes, and a scale beyond float16."""
    if bool((rows[..., :GROUP].view(torch.int8) < -_MAX_LEVEL).any()):
        raise ModelFileError(f"tensor {name!r} has {ODD_LEVEL}")
    if not all(bool(_half(rows[..., half]).isfinite().all()) for half in _HALVES):
        raise ModelFileError(f"tensor {name!r} has {NOT_FINITE}")


def rounded_form(kind: str) -> BlockForm:
    """The form that loses least of a type without its own: 4 bits for equal steps, else 8."""
    four = kind in _EQUAL_STEPS
    return BlockForm(4 if four else 8, 1, steps=False, mins=four)


def rounded_rows(floats: Tensor, form: BlockForm) -> Tensor:
    """Rows of floats, rounded in groups with a scale each, in the format of `block_rows`."""
    if form.bits == 4:
        numbers, steps, zeros = int4_levels(floats)
        halves = steps.half()
        levels = _signed(_split(numbers, halves.shape[1], GROUP))
        return block_rows(levels, halves, mins=halves / 16, min_steps=(zeros * 16).to(torch.uint8))
    groups = F.pad(floats, (0, -floats.shape[1] % GROUP)).view(len(floats), -1, GROUP)
    scales = (groups.abs().amax(2) / _MAX_LEVEL).half()
    found = (groups / scales[..., None].float()).nan_to_num(0.0).round_().clamp_(-_MAX_LEVEL, _MAX_LEVEL)
    return block_rows(found.to(torch.int8), scales)


def _half(octets: Tensor) -> Tensor:
    """Two bytes as a float16 number: [..., 2] -> [...]."""
    return octets.contiguous().view(torch.float16).squeeze(-1)


def _halves(octets: Tensor) -> Tensor:
    """The low halves of bytes, then the high ones: [..., n] -> [..., 2 n]."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _bits(octets: Tensor) -> Tensor:
    """[..., n] -> [..., 8 n], the lowest bit of each byte first."""
    return (octets[..., None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten(-2)


def _split(tensor: Tensor, *sizes: int) -> Tensor:
    """Split the last dimension into these sizes."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def _signed(levels: Tensor) -> Tensor:
    """Unsigned numbers up to 127 as int8."""
    return levels.contiguous().view(torch.int8)


def _q8_0(blocks: Tensor) -> Tensor:
    return block_rows(_signed(blocks[..., 2:]), _half(blocks[..., :2]))


def _q4_0(blocks: Tensor) -> Tensor:
    scales = _half(blocks[..., :2])
    eights = torch.full(scales.shape, 8, dtype=torch.uint8)  # a level of 8 represents 0
    return block_rows(_signed(_halves(blocks[..., 2:])), scales, mins=scales, min_steps=eights)


def _q4_1(blocks: Tensor) -> Tensor:
    scales, offset = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    ones = torch.ones(scales.shape, dtype=torch.uint8)
    return block_rows(_signed(_halves(blocks[..., 4:])), scales, mins=-offset, min_steps=ones)


def _q5_0(blocks: Tensor) -> Tensor:
    levels = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return block_rows(_signed(levels) - 16, _half(blocks[..., :2]))


def _q5_1(blocks: Tensor) -> Tensor:
    scales, offset = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    levels = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    ones = torch.ones(scales.shape, dtype=torch.uint8)
    return block_rows(_signed(levels), scales, mins=-offset, min_steps=ones)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_mins(blocks, _in_pairs(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _split(_bits(blocks[..., 16:48]), GROUP, SPAN).transpose(-1, -2)
    return _with_mins(blocks, _in_pairs(blocks[..., 48:]) | fifth << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    """Two halves of 128 levels; 32 bytes hold the upper two bits of four quarters each."""
    both = _split(blocks[..., :128], 2, 2, GROUP)
    low = torch.cat((both & 15, both >> 4), -2)
    high = _split(blocks[..., 128:192], 2, 1, GROUP)
    levels = (low | _in_quarters(high) << 4).flatten(-3, -2)  # [rows, blocks, SPAN, GROUP]
    steps = _split(_signed(blocks[..., 192:208]), SPAN, 2)
    return _by_groups(_signed(levels) - 32, _half(blocks[..., 208:]), steps)


def _q3_k(blocks: Tensor) -> Tensor:
    """The bits of a byte, or its pairs of bits, belong to different groups."""
    low = _in_quarters(_split(blocks[..., 32:96], 2, 1, GROUP)).flatten(-3, -2)  # [rows, blocks, SPAN, GROUP]
    third = (blocks[..., None, :32] >> torch.arange(SPAN, dtype=torch.uint8)[:, None]).bitwise_and_(1)
    steps = _halves(blocks[..., 96:104]) | _in_quarters(blocks[..., None, 104:108]).flatten(-2) << 4
    return _by_groups(
        _signed(low | third << 2) - 4, _half(blocks[..., 108:]), _split(_signed(steps) - 32, SPAN, 2)
    )


def _iq4_nl(blocks: Tensor) -> Tensor:
    return block_rows(_looked_up(_IQ4, _halves(blocks[..., 2:])), _half(blocks[..., :2]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    high = _in_quarters(blocks[..., 2:4, None]).flatten(-2)
    steps = (_signed(low | high << 4) - 32)[..., None].expand(*low.shape, 2)
    levels = _looked_up(_IQ4, _halves(_split(blocks[..., 8:], SPAN, GROUP // 2)))
    return _by_groups(levels, _half(blocks[..., :2]), steps)


def _mxfp4(blocks: Tensor) -> Tensor:
    """Scales are powers of 2, the levels twice the numbers of the format; a scale below 2^-24 is 0."""
    exponents = blocks[..., 0].to(torch.int32) - 128
    scales = torch.ldexp(torch.ones(exponents.shape), exponents).half()
    return block_rows(_looked_up(_MXFP4, _halves(blocks[..., 1:])), scales)


def _in_quarters(octets: Tensor) -> Tensor:
    """The four pairs of bits of bytes, the lowest first: [..., 1, n] -> [..., 4, n]; also [..., n, 1]."""
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    shifts = pairs if octets.shape[-1] == 1 else pairs[:, None]
    return (octets >> shifts).bitwise_and_(3)


def _looked_up(values: tuple[int, ...], levels: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[levels.int()]


def _in_pairs(octets: Tensor) -> Tensor:
    """Bytes [..., 128] as levels [..., SPAN, GROUP]: 32 bytes hold two groups, the low halves the first."""
    both = _split(octets, SPAN // 2, 1, GROUP)
    return torch.cat((both & 15, both >> 4), -2).flatten(-3, -2)


def _with_mins(blocks: Tensor, levels: Tensor) -> Tensor:
    """Rows of Q4_K or Q5_K: eight steps and eight min steps of six bits are packed into 12 bytes."""
    first, second, third = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    steps = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    min_steps = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    scales, mins = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    both = _signed(steps)[..., None].expand(*steps.shape, 2)
    return _by_groups(_signed(levels), scales, both, mins, min_steps)


def _by_groups(
    levels: Tensor,
    scales: Tensor,
    steps: Tensor,
    mins: Tensor | None = None,
    min_steps: Tensor | None = None,
) -> Tensor:
    """Blocks of SPAN groups, [rows, blocks, SPAN, ...], as consecutive groups."""

    def of_groups(one: Tensor) -> Tensor:
        return one[..., None].expand(*one.shape, SPAN).flatten(1)

    return block_rows(
        levels.flatten(1, 2).contiguous(),
        of_groups(scales),
        steps.flatten(1, 2).contiguous(),
        None if mins is None else of_groups(mins),
        None if min_steps is None else min_steps.flatten(1),
    )


# By ggml's type names.
FILE_BLOCKS: Final = {
    "Q8_0": FileBlocks(BlockForm(8, 1, steps=False, mins=False), _q8_0),
    "Q4_0": FileBlocks(BlockForm(4, 1, steps=False, mins=True), _q4_0),
    "Q4_1": FileBlocks(BlockForm(4, 1, steps=False, mins=True), _q4_1),
    "Q5_0": FileBlocks(BlockForm(6, 1, steps=False, mins=False), _q5_0),
    "Q5_1": FileBlocks(BlockForm(6, 1, steps=False, mins=True), _q5_1),
    "Q4_K": FileBlocks(BlockForm(4, SPAN, steps=True, mins=True), _q4_k),
    "Q5_K": FileBlocks(BlockForm(6, SPAN, steps=True, mins=True), _q5_k),
    "Q6_K": FileBlocks(BlockForm(6, SPAN, steps=True, mins=False), _q6_k),
    "Q3_K": FileBlocks(BlockForm(6, SPAN, steps=True, mins=False), _q3_k),
    "IQ4_NL": FileBlocks(BlockForm(8, 1, steps=False, mins=False), _iq4_nl),
    "IQ4_XS": FileBlocks(BlockForm(8, 1, steps=True, mins=False), _iq4_xs),
    "MXFP4": FileBlocks(BlockForm(6, 1, steps=False, mins=False), _mxfp4),
}
