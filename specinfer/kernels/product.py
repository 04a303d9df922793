"""NativeProduct: a product with a weight laid out for the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import copy
from ctypes import c_int64
from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.layout import SPAN, BlocksWeight
from specinfer.kernels.library import Library
from specinfer.kernels.parts import SumParts
from specinfer.kernels.structures import (
    BLOCK,
    KINDS,
    TYPES,
    AdaptedRowsArgs,
    BlockPartsArgs,
    FloatType,
    Kind,
    PartsArgs,
    ProductArgs,
    num_blocks,
    padded_inner,
)

Product = Callable[[Tensor], Tensor]  # x [rows, inner] -> [rows, channels] in x's dtype
FLOAT_ROWS: Final = 16  # rows that PyTorch multiplies at once

FLOATS: Final[dict[torch.dtype, FloatType]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def float_code(x: Tensor) -> int:
    """The library's code of the dtype of x."""
    if x.dtype not in FLOATS:
        raise TypeError(f"got a tensor of {x.dtype}; native kernels take bfloat16 or float32")
    return TYPES[FLOATS[x.dtype]]


def check_tensor(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError unless x is contiguous, on the CPU, and of this dtype and shape."""
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)} on the CPU, got {x.dtype} {list(x.shape)} on "
            f"{x.device}"
        )


def check_rows(x: Tensor, columns: int) -> int:
    """float_code of x, which must be contiguous rows of `columns` elements on the CPU."""
    if x.dim() != 2 or x.size(1) != columns or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"x must be contiguous rows of {columns} on the CPU, got {list(x.shape)}")
    return float_code(x)


class ProductOptions(NamedTuple):
    """How a model uses its products."""

    loose: bool = False  # a row's result may depend on the number of rows, if that is faster
    nontemporal: bool = False  # read weights past the caches, which would not hold them until the next pass


DEFAULT_OPTIONS: Final = ProductOptions()


class NativeProduct:
    """A Product by the library; `NativeLayers` uses the same `args`.

    A row's result depends on that row alone, unless the product is loose. The given tensors are used in
    place, with the layout of cpu/product.h.
    """

    __slots__ = (
        *("_kept", "_kept_parts", "_library", "args", "channels", "exchange", "inner", "kind", "parts"),
    )

    def __init__(
        self,
        library: Library,
        kind: Kind,
        weight: Tensor,
        *,
        channels: int,
        inner: int,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        largest: float = 0.0,
        bias: Tensor | None = None,
        use: ProductOptions = DEFAULT_OPTIONS,
        parts: SumParts | None = None,
        blocks: BlocksWeight | None = None,
    ) -> None:
        """Tensors may be views of memory that is filled later; only addresses and sizes are read here.

        `bias` is float32 [channels]. `largest` bounds the scales of an int4 weight; for columns of a matrix,
        those of the whole matrix. `parts` determines the order of sums. `blocks` is the whole of a block
        weight. Raises ValueError if a tensor is not contiguous or has a wrong size. Sums of int8 are
        exact and have no parts.
        """
        rows, padded = num_blocks(channels) * BLOCK, padded_inner(kind, inner)
        elements = rows * padded
        groups = elements // 32
        spans = 0 if blocks is None else groups // blocks.span
        wanted = {
            "float32": (elements * 4, 0, 0),
            "bfloat16": (elements * 2, 0, 0),
            "int8": (elements, rows * 4, 0),
            "int4": (elements // 2, groups * 2, groups),
            "blocks4": (elements // 2, spans * 2, 0),
            "blocks6": (elements // 4 * 3, spans * 2, 0),
            "blocks8": (elements, spans * 2, 0),
        }[kind]
        self._kept = [weight, scales, zeros, bias]
        if not all(tensor is None or tensor.is_contiguous() for tensor in self._kept):
            raise ValueError("a weight's tensors must be contiguous, since they are used in place")
        sizes = tuple(0 if t is None else t.nbytes for t in self._kept[:3])
        if sizes != wanted:
            raise ValueError(
                f"got a weight of {sizes[0]} bytes with {sizes[1]} of scales and {sizes[2]} of zeros; "
                f"{kind} {channels} x {inner} has {wanted[0]}, {wanted[1]} and {wanted[2]}"
            )
        if bias is not None:
            check_tensor("bias", bias, torch.float32, channels)
        self.exchange: SharedExchange | None = None  # with the ranks that have the other inner elements
        self.kind = kind
        self.channels = channels
        self.inner = inner
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in self._kept]
        self.args = ProductArgs(
            *(KINDS[kind], *addresses, channels, inner, largest),
            loose=use.loose,
            nontemporal=use.nontemporal,
        )
        self._library = library
        if blocks is not None:
            more = _block_parts(blocks)
            self._kept += more
            self.args.blocks = BlockPartsArgs(
                *(None if tensor is None else tensor.data_ptr() for tensor in more), blocks.span
            )
        self.parts = parts
        if parts is not None:
            parts.check(inner)
            numbers = (c_int64 * len(parts.ends))(*parts.ends), (c_int64 * len(parts.shares))(*parts.shares)
            self._kept_parts = numbers
            ends, shares = map(ctypes.addressof, numbers)
            self.args.parts = PartsArgs(ends, len(parts.ends), parts.numbers.start, shares, parts.ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inner] -> [rows, channels] in x's dtype."""
        code, rows = self._check_rows(x), x.size(0)  # len(x) would take a third of a microsecond
        out = x.new_empty(rows, self.channels)
        self._library.multiply(ctypes.byref(self.args), code, x.data_ptr(), rows, out.data_ptr())
        if self.exchange is not None:
            self.exchange.check()
        return out

    def adapted(self, x: Tensor, rows: AdaptedRowsArgs, number: int) -> Tensor:
        """The same plus the adapters' terms of some rows; `number` is the product's index in the model."""
        code = self._check_rows(x)
        assert self.exchange is None, "adapters are not divided between ranks"
        out = x.new_empty(len(x), self.channels)
        self._library.multiply_adapted(
            *(ctypes.byref(self.args), code, x.data_ptr(), len(x)),
            *(ctypes.byref(rows), number, out.data_ptr()),
        )
        return out

    def join(self, exchange: SharedExchange) -> None:
        """Multiply together with the other ranks from now on; each has some of the inner elements.

        All ranks multiply the same rows at once; create layers afterwards. A product then raises
        PeerLostError. The weight is int8, or has parts for that number of ranks.
        """
        fits = self.kind == "int8" or (self.parts is not None and self.parts.ranks == exchange.ranks)
        assert fits, f"a product with {self.kind} weights has parts for {exchange.ranks} ranks"
        self.exchange = exchange
        self.args.exchange = exchange.address

    def branches(self, x: Tensor) -> Tensor:
        """Sums over complete branches of this rank's parts, float32 [its branches, rows, channels]."""
        parts = self.parts
        assert parts is not None, "a product without parts has no branches"
        code, found = self._check_rows(x), torch.empty(len(parts.branches(parts.rank)), len(x), self.channels)
        self._library.add_branches(
            *(ctypes.byref(self.args), code, x.data_ptr(), len(x), found.data_ptr()),
        )
        return found

    def joined(self, branches: Tensor, dtype: torch.dtype) -> Tensor:
        """Results [rows, channels] in `dtype` from the branches of all ranks, in order.

        The bits are the same however the ranks divide the parts. Raises ValueError unless the product has
        these branches.
        """
        assert self.parts is not None, "a product without parts has no branches"
        check_tensor(
            *("branches", branches, torch.float32),
            *(len(self.parts.all_branches), branches.shape[1], self.channels),
        )
        out = torch.empty(branches.shape[1], self.channels, dtype=dtype)
        self._library.finish_branches(
            *(ctypes.byref(self.args), float_code(out), branches.data_ptr(), len(out), out.data_ptr()),
        )
        return out

    def maxima(self, x: Tensor) -> Tensor:
        """The largest absolute values of rotated rows, float32 [rows].

        Their bits, as int32, have the same order as their values, with NaN above all.
        """
        assert self.kind == "int8", "other weights have no exact sums"
        code, maxima = check_rows(x, self.inner), torch.empty(len(x))
        self._library.find_maxima(ctypes.byref(self.args), code, x.data_ptr(), len(x), maxima.data_ptr())
        return maxima

    def partials(self, x: Tensor, maxima: Tensor) -> Tensor:
        """Exact sums over these inner elements, int32 [rows, channels]; `maxima` are those of whole rows."""
        code, sums = check_rows(x, self.inner), torch.empty(len(x), self.channels, dtype=torch.int32)
        check_tensor("maxima", maxima, torch.float32, len(x))
        self._library.add_up(
            *(ctypes.byref(self.args), code, x.data_ptr(), len(x)),
            *(maxima.data_ptr(), sums.data_ptr()),
        )
        return sums

    def finished(self, sums: Tensor, maxima: Tensor, dtype: torch.dtype) -> Tensor:
        """Results [rows, channels] in `dtype` from the sums of whole rows.

        From the largest `maxima` and the sum of the `partials` of all ranks it computes the bits of the whole
        product. A rank's inner elements start at a multiple of 32 (`GROUP`).
        """
        check_tensor("sums", sums, torch.int32, len(sums), self.channels)
        check_tensor("maxima", maxima, torch.float32, len(sums))
        out = torch.empty(len(sums), self.channels, dtype=dtype)
        self._library.finish(
            *(ctypes.byref(self.args), float_code(out), sums.data_ptr(), len(sums)),
            *(maxima.data_ptr(), out.data_ptr()),
        )
        return out

    def _check_rows(self, x: Tensor) -> int:
        code = check_rows(x, self.inner)
        if self.kind in TYPES and FLOATS[x.dtype] != self.kind:
            raise TypeError(f"x is {FLOATS[x.dtype]}, the weight {self.kind}; the dtypes must be equal")
        return code


def first_channels(product: Product, count: int) -> NativeProduct | None:
    """The product for the first `count` channels, a multiple of 16, with the same memory.

    None if it has no more channels, or is not native.
    """
    if not isinstance(product, NativeProduct) or count >= product.channels:
        return None
    part = copy(product)
    part.channels = count
    part.args = ProductArgs.from_buffer_copy(product.args)
    part.args.channels = count
    return part


def product_args(product: Product) -> ProductArgs:
    """The structure of a native product; the caller must keep the product."""
    assert isinstance(product, NativeProduct), "native layers have native products"
    return product.args


def _block_parts(weight: BlocksWeight) -> list[Tensor | None]:
    """Steps, mins and their steps, None if absent; raises ValueError if a shape or the span is wrong."""
    groups, spans = weight.groups, weight.scales.shape[1]
    blocks, halves = len(weight.levels), 1 if weight.bits == 4 else 2
    steps = weight.steps if weight.has_steps else None
    mins, min_steps = (weight.mins, weight.min_steps) if weight.has_mins else (None, None)
    wanted = {"steps": (steps, groups * halves), "mins": (mins, spans), "min_steps": (min_steps, groups)}
    for name, (tensor, entries) in wanted.items():
        if tensor is not None:
            check_tensor(name, tensor, tensor.dtype, blocks, entries, BLOCK)
    if weight.span != 1 and (weight.span != SPAN or groups % SPAN or steps is None or weight.bits == 8):
        raise ValueError(
            f"got {groups} groups of {weight.bits} bits in {spans} spans, {'no ' * (steps is None)}steps; "
            f"allowed: spans of 1, or of {SPAN} with steps and 4 or 6 bits"
        )
    return [steps, mins, min_steps]
