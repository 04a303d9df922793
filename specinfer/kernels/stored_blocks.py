"""Rows of a file: the library reads them into the layout of products, quantized or not, and as elements.

The numbers are those of models/gguf_blocks.py, kernels/file_blocks.py and kernels/quantizers.py, which do the
same in PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.layout import BlocksWeight, Int4Weight, Int8Weight
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOATS, NativeProduct
from specinfer.kernels.quantized import NativeProducts
from specinfer.kernels.structures import BLOCK, FILE_KINDS, FLOAT_KINDS, TYPES, FileRowsArgs

_ONE: Final = 129  # a step of 1, as stored
_UNREAD: Final = 1  # of Stored in cpu/file_blocks.h
ODD_LEVEL: Final = "a level of -128; allowed for Q8_0: -127 .. 127"
NOT_FINITE: Final = (
    "a scale that is not finite in float16; get the file again, or use quantization int8, int4 or none"
)
_FAULTS: Final = {2: ODD_LEVEL, 3: NOT_FINITE}  # of Stored, too
_AT_ONCE: Final = 1 << 24  # elements per call, during which no other thread can use the library


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
    products = NativeProducts(library)
    if isinstance(into, Int8Weight):
        return products.int8(into, None, inner, channels)
    if isinstance(into, Int4Weight):
        product = products.int4(into, None, inner, channels, largest=0.0)
    else:
        if not into.has_steps:
            into.steps.fill_(_ONE)
        if not into.has_mins:
            into.mins.zero_()
            into.min_steps.zero_()
        product = products.blocks(into, None, inner, channels)
    assert isinstance(product, NativeProduct)
    return product


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
