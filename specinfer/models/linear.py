"""Matrix products with weights laid out once for the machine they run on.

A step checks 1 to 64 rows against the same weights, so on a CPU the time is the weights' bytes over the
memory bandwidth, if the kernel can read them in order. In bfloat16 our own tiles give that on CPUs with
AVX512-BF16, and oneDNN's packed layout on those with AMX: 16 rows cost what one costs there, where the plain
layout costs half as much again.

A row's result should not depend on how many rows there are, or greedy text would change where two logits are
close. Our own products keep to that; packed ones do from two rows on, on CPUs with AMX up to 32; others do
where they are given whole blocks of rows. Both were found by trying (docs/log.md), and tests try again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.choice import TORCH, Kernels

# The row count the packed layout is tuned for; the middle of what a token tree holds.
_PACK_ROWS = 16
_AMX_ROWS = 32  # beyond these the packed products of a CPU with AMX round differently
_BLOCK_ROWS = 16


class Linear(Protocol):
    """y = x W^T + b for x [rows, in]; returns [rows, out] in x's dtype."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        ...


class PlainLinear:
    """A product with the weight as it is: float32, and every GPU."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        return F.linear(x, self._weight, self._bias)


class BlockLinear:
    """A PlainLinear over whole blocks of rows, the last one filled up: a row's result is always the same."""

    __slots__ = ("_product",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._product = PlainLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        return self._product(F.pad(x, (0, 0, 0, -len(x) % _BLOCK_ROWS)))[: len(x)]


class PackedLinear:
    """A bf16 product on a CPU with the weight in oneDNN's packed layout; the given weight is not kept.

    At most `rows` of them are multiplied at once.
    """

    __slots__ = ("_bias", "_out", "_product", "_rows", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, rows: int | None = None) -> None:
        self._out = weight.shape[0]
        self._rows = rows
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if x.shape[0] == 0:  # oneDNN refuses empty products
            return x.new_empty(0, self._out)
        if self._rows is not None and len(x) > self._rows:
            # Parts of nearly the same height: a single row would be another product.
            return torch.cat([self(part) for part in x.tensor_split(-(-len(x) // self._rows))])
        return self._product(x, self._weight, self._bias, "none", [], "")


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this kind are packed."""
    return (
        dtype is torch.bfloat16
        and device.type == "cpu"
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def make_linear(weight: Tensor, bias: Tensor | None = None, kernels: Kernels = TORCH) -> Linear:
    """The fastest product for this weight [out, in] and bias [out]; drop `weight` afterwards.

    Where `kernels` ask for rows that do not depend on their number, the fastest such one on a CPU; a lone row
    may still differ, and `lone_row_differs` says where.
    """
    if _tiles(weight.dtype, weight.device, kernels):
        assert kernels.bfloat16 is not None
        return kernels.bfloat16(weight, bias)
    if packs(weight.dtype, weight.device):
        differs = kernels.batch_invariant and torch.cpu._is_amx_tile_supported()
        return PackedLinear(weight, bias, rows=_AMX_ROWS if differs else None)
    return (BlockLinear if kernels.batch_invariant else PlainLinear)(weight, bias)


def lone_row_differs(dtype: torch.dtype, device: torch.device, kernels: Kernels) -> bool:
    """Whether one row alone is to be run as two, for the result it has beside others."""
    if kernels.batch_invariant is False or _tiles(dtype, device, kernels):
        return False
    return packs(dtype, device)


def _tiles(dtype: torch.dtype, device: torch.device, kernels: Kernels) -> bool:
    """Whether the product is our own."""
    return kernels.bfloat16 is not None and dtype is torch.bfloat16 and device.type == "cpu"
