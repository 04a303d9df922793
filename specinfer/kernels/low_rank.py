"""Low-rank adapters (LoRA): what rows that have one get besides what a product gives them.

A row's result is that of the product plus scale * B (A x) of each matrix that the product stacks, added in
float32 and rounded once. It depends on that row and its adapter alone, so rows with any adapters and with
none may lie in one pass. Products of a model have numbers; a model's layer knows which are its own.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
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

# The numbers of a layer's products, and how many it has; cpu/layers.cpp knows the same.
QKV, OUT, UP, DOWN = range(4)
PER_LAYER: Final = 4
_NONE: Final = -1  # a row's place where it has no adapter


class LowRankPart(NamedTuple):
    """What an adapter adds to one matrix of those that a product stacks."""

    channels: range  # of the product
    ranks: range  # the rows of A that are its own
    up: Tensor  # B, [channels, ranks]
    scale: float


class LowRank(NamedTuple):
    """What an adapter adds to one product: parts of different channels, over one A."""

    down: Tensor  # A, [ranks of all parts, inner]
    parts: Sequence[LowRankPart]

    def sums(self, x: Tensor, channels: int) -> Tensor:
        """What it adds to these rows [rows, inner] of the product, float32 [rows, channels].

        A CPU has as many rows each time, or a row would round differently.
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
    """What an adapter adds to each of a model's products, in their order; None: nothing."""

    def __init__(self, products: Sequence[LowRank | None]) -> None:
        self.products = products

    @classmethod
    def of(cls, products: Sequence[LowRank | None], library: Library | None) -> Adapter:
        """An adapter that the library adds; None: PyTorch does.

        Its tensors are contiguous, and of the dtype that rows have.
        """
        return Adapter(products) if library is None else NativeAdapter(products)


class NativeAdapter(Adapter):
    """The same as the native library reads it; the tensors that it is made of are not kept."""

    def __init__(self, products: Sequence[LowRank | None]) -> None:
        super().__init__([])
        self.dtypes = {product.down.dtype for product in products if product is not None}
        self._kept: list[Tensor | ctypes.Array[LowRankPartArgs]] = []  # whose memory `args` points to
        self.args = (LowRankArgs * len(products))(*map(self._args_of, products))

    def _args_of(self, product: LowRank | None) -> LowRankArgs:
        if product is None:
            return LowRankArgs()
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
        """The address of a matrix [rows, inner] in blocks of rows, as cpu/low_rank.h has it."""
        rows, inner = matrix.shape
        whole = F.pad(matrix, (0, 0, 0, -rows % BLOCK)).view(num_blocks(rows), BLOCK, inner)
        blocks = whole.transpose(1, 2).contiguous()
        self._kept.append(blocks)
        return blocks.data_ptr()


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a pass, side by side, with one adapter."""

    rows: range
    adapter: Adapter


class AdaptedRows:
    """The rows of a pass that have adapters, as PyTorch multiplies them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    @classmethod
    def of(cls, spans: Sequence[Span], rows: int, library: Library | None) -> AdaptedRows | None:
        """Those of a pass of so many rows; None where none has an adapter."""
        if not spans:
            return None
        return AdaptedRows(spans) if library is None else NativeAdaptedRows(spans, rows, library)

    def multiply(self, product: Product, number: int, x: Tensor) -> Tensor:
        """The product with rows x, and what their adapters add to it, [rows, channels] in x's dtype.

        `number` is the product's among the model's.
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
        own: dict[int, tuple[NativeAdapter, list[int]]] = {}  # by the adapter, of which there is one each
        for span in spans:
            assert isinstance(span.adapter, NativeAdapter), "the library reads what was laid out for it"
            own.setdefault(id(span.adapter), (span.adapter, []))[1].extend(span.rows)
        self._adapters = [adapter for adapter, _ in own.values()]
        sorted_rows = [row for _, rows_of_one in own.values() for row in rows_of_one]
        ends = [*accumulate(len(rows_of_one) for _, rows_of_one in own.values())]
        places = [_NONE] * rows
        for place, row in enumerate(sorted_rows):
            places[row] = place
        adapters = [ctypes.addressof(adapter.args) for adapter in self._adapters]
        self._told = [array("q", numbers) for numbers in (sorted_rows, ends, adapters, places)]
        at = [told.buffer_info()[0] for told in self._told]
        self._args = AdaptedRowsArgs(*at[:3], len(adapters), at[3])

    def args(self, rows: int, dtype: torch.dtype) -> AdaptedRowsArgs:
        """What a call of the library is told, of a pass of so many rows in `dtype`.

        Raises ValueError where these are not that pass's, or adapters are of another dtype.
        """
        others = {found for adapter in self._adapters for found in adapter.dtypes} - {dtype}
        if rows != self._rows or others:
            found = sorted(map(str, others)) or dtype
            raise ValueError(f"adapters of {self._rows} rows, of {found}, for {rows} of {dtype}")
        return self._args

    def multiply(self, product: Product, number: int, x: Tensor) -> Tensor:
        """As AdaptedRows says."""
        assert isinstance(product, NativeProduct), "adapters are added to native products alone"
        return product.adapted(x, self.args(len(x), x.dtype), number)


class AdaptedLayer(NamedTuple):
    """The same as one layer multiplies them."""

    rows: AdaptedRows
    layer: int

    @classmethod
    def of(cls, rows: AdaptedRows | None, layer: int) -> AdaptedLayer | None:
        """Those of a layer of this number; None where no row has an adapter."""
        return None if rows is None else cls(rows, layer)


def times(product: Product, number: int, x: Tensor, adapted: AdaptedLayer | None) -> Tensor:
    """A layer's product of this number with rows x, and what their adapters add to it."""
    if adapted is None:
        return product(x)
    return adapted.rows.multiply(product, PER_LAYER * adapted.layer + number, x)
