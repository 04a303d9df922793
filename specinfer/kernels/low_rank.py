"""Low-rank adapters (LoRA): the terms that adapted rows get in addition to a product.

A row's result is the product plus scale * B (A x) for each matrix that the product stacks, added in float32
and rounded once. It depends on that row and its adapter alone, so rows with different adapters and with none
may share a pass. A model's products are numbered by layer.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.layout import in_huge_pages
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOAT_ROWS, FLOATS, NativeProduct, Product
from specinfer.kernels.structures import (
    BLOCK,
    KINDS,
    AdaptedRowsArgs,
    Kind,
    LowRankArgs,
    LowRankPartArgs,
    num_blocks,
)

# The products of a layer, and their number; the same as in cpu/layers.cpp.
QKV, OUT, UP, DOWN = range(4)
PER_LAYER: Final = 4
_NONE: Final = -1  # a row without an adapter
_HUGE_PAGE: Final = 1 << 21  # bytes, as in cpu/memory.h
_MIN_SCALE: Final = 2.0**-126  # smallest normal float32, for a row of int8
_SCALE_BYTES: Final = 4 * BLOCK  # of a block of int8


class Int8Rows(NamedTuple):
    """A matrix as scales * values."""

    values: Tensor  # int8 [rows, inner], -127 .. 127
    scales: Tensor  # float32 [rows]

    @classmethod
    def of(cls, matrix: Tensor) -> Int8Rows:
        """Round a float32 matrix [rows, inner] to 255 levels per row."""
        scales = (matrix.abs().amax(1) / 127.0).clamp_(min=_MIN_SCALE)
        return cls((matrix / scales[:, None]).round_().to(torch.int8), scales)


Matrix: TypeAlias = Tensor | Int8Rows  # floats, in the dtype of the rows, or int8


class LowRankPart(NamedTuple):
    """The term for one matrix of those that a product stacks."""

    channels: range  # channels of the product
    ranks: range  # rows of A used by this part
    up: Matrix  # B, [channels, ranks]
    scale: float


class LowRank(NamedTuple):
    """The terms for one product: parts for different channels, with one A."""

    down: Matrix  # A, [ranks of all parts, inner]
    parts: Sequence[LowRankPart]

    def to_int8(self) -> LowRank:
        """The same with int8 matrices; these must be float32."""
        assert isinstance(self.down, Tensor), "matrices are rounded once"
        parts = [part._replace(up=Int8Rows.of(part.up)) for part in self.parts if isinstance(part.up, Tensor)]
        return LowRank(Int8Rows.of(self.down), parts)

    def sums(self, x: Tensor, channels: int) -> Tensor:
        """The terms for these rows [rows, inner], float32 [rows, channels].

        On a CPU rows are multiplied in fixed-size batches, since a row rounds differently in batches of other
        sizes.
        """
        if x.device.type != "cpu":
            return self._sums(x, channels)
        whole = F.pad(x, (0, 0, 0, -len(x) % FLOAT_ROWS))
        firsts = range(0, len(whole), FLOAT_ROWS)
        return torch.cat([self._sums(whole[i : i + FLOAT_ROWS], channels) for i in firsts])[: len(x)]

    def _sums(self, x: Tensor, channels: int) -> Tensor:
        low = F.linear(x.float(), _floats(self.down))
        found = low.new_zeros(len(x), channels)
        for part in self.parts:
            own = low[:, part.ranks.start : part.ranks.stop].contiguous()
            found[:, part.channels.start : part.channels.stop] = F.linear(own, _floats(part.up)) * part.scale
        return found


def _floats(matrix: Matrix) -> Tensor:
    return matrix.float() if isinstance(matrix, Tensor) else matrix.values * matrix.scales[:, None]


def matrix_bytes(rows: int, inner: int, weights: torch.dtype) -> int:
    """The bytes of A [rows, inner] as in cpu/low_rank.h."""
    scales = _SCALE_BYTES if weights is torch.int8 else 0
    return num_blocks(rows) * (BLOCK * inner * weights.itemsize + scales)


def part_bytes(channels: range, rank: int, weights: torch.dtype) -> int:
    """The bytes of B for these channels of a product, in blocks of the product."""
    return matrix_bytes(channels.start % BLOCK + len(channels), rank, weights)


class Adapter:
    """The terms of an adapter for each of a model's products, in order; None: no term."""

    def __init__(self, products: Sequence[LowRank | None]) -> None:
        self.products = products

    @classmethod
    def of(cls, products: Iterable[LowRank | None], size: int, library: Library | None) -> Adapter:
        """Create an adapter for the library, or for PyTorch if `library` is None.

        The products' tensors are contiguous. `size` is the sum of their bytes, which the library's adapter
        takes in one piece.
        """
        return Adapter([*products]) if library is None else NativeAdapter(products, size, library)


class NativeAdapter(Adapter):
    """An adapter for the native library; the original tensors are not kept."""

    def __init__(self, products: Iterable[LowRank | None], size: int, library: Library) -> None:
        super().__init__([])
        self.dtypes: set[torch.dtype] = set()  # that rows must have
        # One memory in the order of a pass: with pages of 4 KB the terms take 10% longer.
        memory = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
        first = -memory.data_ptr() % _HUGE_PAGE
        self._memory = in_huge_pages(library, memory[first : first + size])
        self.used_bytes = 0  # all of it, after the products
        self._parts: list[ctypes.Array[LowRankPartArgs]] = []  # owns memory that `args` points to
        args = [self._args_of(product) for product in products]
        self.args = (LowRankArgs * len(args))(*args)
        assert self.used_bytes == size, "the size is that of the products"

    def _args_of(self, product: LowRank | None) -> LowRankArgs:
        if product is None:
            return LowRankArgs()
        kind: Kind = "int8"
        if isinstance(product.down, Tensor):
            self.dtypes.add(product.down.dtype)
            kind = FLOATS[product.down.dtype]
        down = self._laid_out(product.down)
        parts = (LowRankPartArgs * len(product.parts))(*map(self._args_of_part, product.parts))
        self._parts.append(parts)
        return LowRankArgs(KINDS[kind], down, len(_rows(product.down)), parts, len(parts))

    def _args_of_part(self, part: LowRankPart) -> LowRankPartArgs:
        first, lead = divmod(part.channels.start, BLOCK)
        blocks = num_blocks(lead + len(part.channels))
        up = self._laid_out(part.up, lead)
        return LowRankPartArgs(first, blocks, part.ranks.start, len(part.ranks), up, part.scale)

    def _laid_out(self, matrix: Matrix, lead: int = 0) -> int:
        """Copy a matrix in blocks of rows, as in cpu/low_rank.h, after `lead` rows of zeros; its address."""
        rows = _rows(matrix)
        padding = lead, -(lead + len(rows)) % BLOCK
        whole = F.pad(rows, (0, 0, *padding))
        blocks = whole.view(-1, BLOCK, rows.shape[1]).transpose(1, 2).flatten(1)
        if isinstance(matrix, Int8Rows):
            scales = F.pad(matrix.scales, padding).view(-1, BLOCK)
            blocks = torch.cat([scales.view(torch.int8), blocks], 1)
        to = self._memory[self.used_bytes :][: blocks.nbytes]
        to.copy_(blocks.view(torch.uint8).flatten())
        self.used_bytes += blocks.nbytes
        return to.data_ptr()


def _rows(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.values


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a pass with one adapter."""

    rows: range
    adapter: Adapter


class AdaptedRows:
    """The adapted rows of a pass, multiplied by PyTorch."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    @classmethod
    def of(cls, spans: Sequence[Span], rows: int, library: Library | None) -> AdaptedRows | None:
        """The adapted rows of a pass of `rows` rows; None if no row has an adapter."""
        if not spans:
            return None
        return AdaptedRows(spans) if library is None else NativeAdaptedRows(spans, rows, library)

    def multiply(self, product: Product, number: int, x: Tensor) -> Tensor:
        """The product of rows x plus their adapters' terms, [rows, channels] in x's dtype.

        `number` is the index of the product in the model.
        """
        y = product(x)
        for span in self._spans:
            if (low := span.adapter.products[number]) is not None:
                at = slice(span.rows.start, span.rows.stop)
                y[at] = (y[at].float() + low.sums(x[at], y.shape[1])).to(y.dtype)
        return y


class NativeAdaptedRows(AdaptedRows):
    """The same by the library, in calls of all layers or product by product; products must be native."""

    def __init__(self, spans: Sequence[Span], rows: int, library: Library) -> None:
        super().__init__(spans)
        self._library = library
        self._rows = rows
        own: dict[int, tuple[NativeAdapter, list[int]]] = {}  # by id() of the adapter
        for span in spans:
            assert isinstance(span.adapter, NativeAdapter), "native rows need native adapters"
            own.setdefault(id(span.adapter), (span.adapter, []))[1].extend(span.rows)
        self._adapters = [adapter for adapter, _ in own.values()]
        sorted_rows = [row for _, rows_of_one in own.values() for row in rows_of_one]
        ends = [*accumulate(len(rows_of_one) for _, rows_of_one in own.values())]
        places = [_NONE] * rows
        for place, row in enumerate(sorted_rows):
            places[row] = place
        adapters = [ctypes.addressof(adapter.args) for adapter in self._adapters]
        self._numbers = [array("q", numbers) for numbers in (sorted_rows, ends, adapters, places)]
        at = [numbers_of_one.buffer_info()[0] for numbers_of_one in self._numbers]
        self._args = AdaptedRowsArgs(*at[:3], len(adapters), at[3])

    def args(self, rows: int, dtype: torch.dtype) -> AdaptedRowsArgs:
        """The arguments of a library call, for a pass of `rows` rows in `dtype`.

        Raises ValueError if the pass has other rows, or adapters have another dtype.
        """
        others = {found for adapter in self._adapters for found in adapter.dtypes} - {dtype}
        if rows != self._rows or others:
            found = sorted(map(str, others)) or dtype
            raise ValueError(f"got adapters for {self._rows} rows of {found}, not {rows} rows of {dtype}")
        return self._args

    def multiply(self, product: Product, number: int, x: Tensor) -> Tensor:
        """See AdaptedRows."""
        assert isinstance(product, NativeProduct), "native rows need native products"
        return product.adapted(x, self.args(len(x), x.dtype), number)


class AdaptedLayer(NamedTuple):
    """The adapted rows for one layer."""

    rows: AdaptedRows
    layer: int

    @classmethod
    def of(cls, rows: AdaptedRows | None, layer: int) -> AdaptedLayer | None:
        """Adapted rows of one layer; None if no row has an adapter."""
        return None if rows is None else cls(rows, layer)


def times(product: Product, number: int, x: Tensor, adapted: AdaptedLayer | None) -> Tensor:
    """A layer's product of this number with rows x, plus their adapters' terms."""
    if adapted is None:
        return product(x)
    return adapted.rows.multiply(product, PER_LAYER * adapted.layer + number, x)
