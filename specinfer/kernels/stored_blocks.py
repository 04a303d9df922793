"""Blocks in a GGUF file: the library reads them into the layout of products, and as elements.

The numbers are those of models/gguf_blocks.py and kernels/file_blocks.py, which do the same in PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.layout import BlocksWeight
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOATS, NativeProduct
from specinfer.kernels.quantized import NativeProducts
from specinfer.kernels.structures import FILE_KINDS, TYPES, FileRowsArgs

_ONE: Final = 129  # a step of 1, as stored
_UNREAD: Final = 1  # of Stored in cpu/file_blocks.h
ODD_LEVEL: Final = "a level of -128; allowed for Q8_0: -127 .. 127"
NOT_FINITE: Final = (
    "a scale that is not finite in float16; get the file again, or use quantization int8, int4 or none"
)
_FAULTS: Final = {2: ODD_LEVEL, 3: NOT_FINITE}  # of Stored, too


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a matrix in a file."""

    path: Path
    name: str  # of the matrix there
    kind: str  # ggml's name of their type
    offset: int  # bytes before the matrix
    row_bytes: int
    rows: Sequence[int]  # their numbers, in order


def read_blocks(library: Library, stored: Sequence[StoredRows], inner: int, into: BlocksWeight) -> None:
    """Fill `into` with matrices of FILE_KINDS, stacked by rows.

    Raises ModelFileError if a file cannot be read, or has a level or scale that products do not support.
    """
    if not into.has_steps:
        into.steps.fill_(_ONE)
    if not into.has_mins:
        into.mins.zero_()
        into.min_steps.zero_()
    channels = sum(len(one.rows) for one in stored)
    product, channel = NativeProducts(library).blocks(into, None, inner, channels), 0
    assert isinstance(product, NativeProduct)
    for one in stored:
        order = None if isinstance(one.rows, range) else np.array(one.rows, dtype=np.int64)
        try:
            with one.path.open("rb", buffering=0) as file:
                args = FileRowsArgs(
                    *(file.fileno(), FILE_KINDS[one.kind], one.offset, one.row_bytes),
                    *(None if order is None else order.ctypes.data, one.rows[0], len(one.rows)),
                )
                found = library.lay_out_blocks(ctypes.byref(args), channel, ctypes.byref(product.args))
        except OSError as error:
            raise ModelFileError(f"{one.path} cannot be read ({error.strerror})") from error
        if found == _UNREAD:
            raise ModelFileError(f"{one.path} cannot be read, or became shorter; download it again")
        if found:
            raise ModelFileError(f"tensor {one.name!r} has {_FAULTS[found]}")
        channel += len(one.rows)


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
