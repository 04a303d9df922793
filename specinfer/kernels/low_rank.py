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
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.library import Library
from specinfer.kernels.parts_product import FLOAT_ROWS
from specinfer.kernels.product import NativeProduct, Product
from specinfer.kernels.structures import BLOCK, AdaptedRowsArgs, LowRankArgs, LowRankPartArgs, num_blocks

# The products of a layer, and their number; the same as in cpu/layers.cpp.
QKV, OUT, UP, DOWN = range(4)
PER_LAYER: Final = 4
_NONE: Final = -1  # a row without an adapter


class LowRankPart(NamedTuple):
    """The term for one matrix of those that a product stacks."""

    channels: range  # channels of the product
    ranks: range  # rows of A used by this part
    up: Tensor  # B, [channels, ranks]
    scale: float


class LowRank(NamedTuple):
    """The terms for one product: parts for different channels, with one A."""

    down: Tensor  # A, [ranks of all parts, inner]
    parts: Sequence[LowRankPart]

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
        low = F.linear(x.float(), self.down.float())
        found = low.new_zeros(len(x), channels)
        for part in self.parts:
            own = low[:, part.ranks.start : part.ranks.stop].contiguous()
            found[:, part.channels.start : part.channels.stop] = F.linear(own, part.up.float()) * part.scale
        return found


class Adapter:
    """The terms of an adapter for each of a model's products, in order; None: no term."""

    def __init__(self, products: Sequence[LowRank | None]) -> None:
        self.products = products

    @classmethod
    def of(cls, products: Iterable[LowRank | None], library: Library | None) -> Adapter:
        """Create an adapter for the library, or for PyTorch if `library` is None.

        Its tensors are contiguous, with the dtype of the rows.
        """
        return Adapter([*products]) if library is None else NativeAdapter(products)


class NativeAdapter(Adapter):
    """An adapter for the native library; the original tensors are not kept."""

    def __init__(self, products: Iterable[LowRank | None]) -> None:
        super().__init__([])
        self.dtypes: set[torch.dtype] = set()
        self._kept: list[Tensor | ctypes.Array[LowRankPartArgs]] = []  # owns the memory that `args` points to
        args = [self._args_of(product) for product in products]
        self.args = (LowRankArgs * len(args))(*args)

    def _args_of(self, product: LowRank | None) -> LowRankArgs:
        if product is None:
            return LowRankArgs()
        self.dtypes.add(product.down.dtype)
        parts = (LowRankPartArgs * len(product.parts))(
            *(
                LowRankPartArgs(
                    *(part.channels.start, len(part.channels), part.ranks.start, len(part.ranks)),
                    *(self._laid_out(part.up), part.scale),
                )
                for part in product.parts
            )
        )
        self._kept.append(parts)
        return LowRankArgs(self._laid_out(product.down), len(product.down), parts, len(parts))

    def _laid_out(self, matrix: Tensor) -> int:
        """The address of a matrix [rows, inner] in blocks of rows, as in cpu/low_rank.h."""
        rows, inner = matrix.shape
        whole = F.pad(matrix, (0, 0, 0, -rows % BLOCK)).view(num_blocks(rows), BLOCK, inner)
        blocks = whole.transpose(1, 2).contiguous()
        self._kept.append(blocks)
        return blocks.data_ptr()


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
        """Those of a layer of this number; None if no row has an adapter."""
        return None if rows is None else cls(rows, layer)


def times(product: Product, number: int, x: Tensor, adapted: AdaptedLayer | None) -> Tensor:
    """A layer's product of this number with rows x, plus their adapters' terms."""
    if adapted is None:
        return product(x)
    return adapted.rows.multiply(product, PER_LAYER * adapted.layer + number, x)
