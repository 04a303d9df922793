"""Matrices of GGUF blocks in their own precision, and rows of files in the layout of products.

A group of 32 elements of a row is scale * step * level - min * min_step. Scales and mins are the file's
float16 values, steps are integers: per group in Q4_K and Q5_K, per half group in Q6_K. So no number of the
file is rounded.

The library reads rows of blocks and of floats, quantized or not (`read_stored`), with the numbers of
models/gguf_blocks.py, `lay_out_blocks` and kernels/layout.py, which do the same in PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.layout import (
    GROUP,
    OFFSET,
    BlocksWeight,
    Int4Weight,
    Int8Weight,
    in_huge_pages,
    pack_levels,
    padded,
)
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOATS, NativeProduct
from specinfer.kernels.quantized import NativeProducts
from specinfer.kernels.structures import (
    BLOCK,
    FILE_KINDS,
    FLOAT_KINDS,
    TYPES,
    FileRowsArgs,
    num_blocks,
)

# Bytes of a group of a row, as read from a file's blocks: levels, scale, a step for each half, min, its step.
ROW_BYTES: Final = GROUP + 2 + 2 + 2 + 1
_SCALE, _STEPS, _MIN, _MIN_STEP = GROUP, GROUP + 2, GROUP + 4, GROUP + 6
_ONE: Final = 129  # a step of 1, as stored
_UNREAD: Final = 1  # of Stored in cpu/file_blocks.h
ODD_LEVEL: Final = "a level of -128; allowed for Q8_0: -127 .. 127"
NOT_FINITE: Final = (
    "a scale that is not finite in float16; get the file again, or use quantization int8, int4 or none"
)
_FAULTS: Final = {2: ODD_LEVEL, 3: NOT_FINITE}  # of Stored, too
_AT_ONCE: Final = 1 << 24  # elements per call, during which no other thread can use the library


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Layout of blocks; a matrix with several forms uses one that can represent all of them."""

    bits: Literal[4, 6, 8]  # per level: 0 .. 15, -32 .. 31, -127 .. 127
    span: int  # groups that share a scale, and a min: 1, or SPAN with steps and levels of 4 or 6 bits
    steps: bool  # some steps differ from 1
    mins: bool

    def __or__(self, other: BlockForm) -> BlockForm:
        return BlockForm(
            max(self.bits, other.bits),
            min(self.span, other.span),
            self.steps or other.steps,
            self.mins or other.mins,
        )


def empty_blocks(channels: int, inner: int, form: BlockForm, library: Library | None = None) -> BlocksWeight:
    """Uninitialized memory for a matrix of blocks."""
    blocks, groups = num_blocks(channels), padded(inner) // GROUP
    halves, spans = (1 if form.bits == 4 else 2), -(-groups // form.span)

    def memory(dtype: torch.dtype, *sizes: int) -> Tensor:
        return in_huge_pages(library, torch.empty(blocks, *sizes, dtype=dtype))

    return BlocksWeight(
        memory(torch.uint8, groups, form.bits, BLOCK, 4),
        memory(torch.float16, spans, BLOCK),
        memory(torch.uint8, groups * halves if form.steps else 1, BLOCK),
        memory(torch.float16, spans if form.mins else 1, BLOCK),
        memory(torch.uint8, groups if form.mins else 1, BLOCK),
    )


@cache
def blocks_bytes(channels: int, inner: int, form: BlockForm) -> int:
    """The bytes of a matrix of blocks."""
    with torch.device("meta"):
        return sum(part.nbytes for part in empty_blocks(channels, inner, form))


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
        steps = rows[..., _STEPS : _STEPS + 1]
    else:
        steps = rows[..., _STEPS:_MIN].reshape(len(rows), groups * 2, 1)
    if not form.steps:
        steps = steps[:, :1] * 0 + 1
    mins, min_steps = rows[:, spans, _MIN:_MIN_STEP], rows[..., _MIN_STEP:]
    if not form.mins:
        mins, min_steps = mins[:, :1], min_steps[:, :1]
    return BlocksWeight(
        pack_levels(levels, form.bits),
        by_blocks(rows[:, spans, _SCALE:_STEPS], torch.float16),
        by_blocks(steps ^ OFFSET),
        by_blocks(mins, torch.float16),
        by_blocks(min_steps),
    )


def one_form(forms: Sequence[BlockForm]) -> BlockForm:
    """The form that can represent matrices of all these forms."""
    return reduce(BlockForm.__or__, forms)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a matrix in a file."""

    path: Path
    name: str  # of the matrix there
    kind: str  # ggml's name of their type, of FILE_KINDS, FLOAT_KINDS or others
    offset: int  # bytes before the matrix
    row_bytes: int
    rows: Sequence[int]  # their numbers, in order


def read_stored(
    library: Library,
    stored: Sequence[StoredRows],
    inner: int,
    into: BlocksWeight | Int8Weight | Int4Weight,
    count: Callable[[int], None] = lambda _: None,
) -> bool:
    """Fill `into` with matrices, stacked by rows; `count` is called with numbers of elements.

    A BlocksWeight is filled from FILE_KINDS. The others are quantized from these and from FLOAT_KINDS, with
    the bits of `quantize_int8` and `quantize_int4`; False if a value is not finite, or too large, which they
    treat. Raises ModelFileError if a file cannot be read, or has a level or scale that products do not
    support.
    """
    channels, channel = sum(len(one.rows) for one in stored), 0
    product = _product(library, into, inner, channels)
    step = max(1, _AT_ONCE // inner // BLOCK) * BLOCK
    for one in stored:
        try:
            with one.path.open("rb", buffering=0) as file:
                for start in range(0, len(one.rows), step):
                    rows = one.rows[start : start + step]
                    order = (
                        None if isinstance(rows, range) and rows.step == 1 else np.array(rows, dtype=np.int64)
                    )
                    args = FileRowsArgs(
                        *(file.fileno(), (FILE_KINDS | FLOAT_KINDS)[one.kind], one.offset, one.row_bytes),
                        *(None if order is None else order.ctypes.data, rows[0], len(rows)),
                    )
                    found = library.lay_out_rows(ctypes.byref(args), channel, ctypes.byref(product.args))
                    if found:
                        break
                    channel += len(rows)
                    count(len(rows) * inner)
        except OSError as error:
            raise ModelFileError(f"{one.path} cannot be read ({error.strerror})") from error
        if found == _UNREAD:
            raise ModelFileError(f"{one.path} cannot be read, or became shorter; download it again")
        if found and not isinstance(into, BlocksWeight):
            return False
        if found:
            raise ModelFileError(f"tensor {one.name!r} has {_FAULTS[found]}")
    return True


def _product(
    library: Library, into: BlocksWeight | Int8Weight | Int4Weight, inner: int, channels: int
) -> NativeProduct:
    """The product whose arrays are filled."""
    if isinstance(into, BlocksWeight) and not into.has_steps:
        into.steps.fill_(_ONE)
    if isinstance(into, BlocksWeight) and not into.has_mins:
        into.mins.zero_()
        into.min_steps.zero_()
    return NativeProducts(library).laid_out(into, None, inner, channels, largest=0.0)


def block_elements(
    library: Library, kind: str, octets_NB: NDArray[np.uint8], inner: int, dtype: torch.dtype
) -> Tensor:
    """The elements of N rows of blocks of FILE_KINDS, [N, inner] in float32 or bfloat16."""
    elements = torch.empty(len(octets_NB), inner, dtype=dtype)
    library.to_elements(
        *(FILE_KINDS[kind], octets_NB.ctypes.data, elements.numel()),
        *(TYPES[FLOATS[dtype]], elements.data_ptr()),
    )
    return elements
