"""Matrix products with weights laid out once for the machine they run on.

A step checks 1 to 64 rows against the same weights, so on a CPU the time is the weights' bytes over the
memory bandwidth, if the kernel can read them in order. oneDNN's packed bf16 layout gives that: 16 rows cost
what one costs, where the plain layout costs half as much again.

A row's result should not depend on how many rows there are, or greedy text would change where two logits are
close. Packed products keep to that from two rows on, on CPUs with AMX up to 32; others do where they are
given whole blocks of rows. Both were found by trying (docs/log.md), and tests try again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

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


def make_linear(weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Linear:
    """The fastest product for this weight [out, in] and bias [out]; drop `weight` afterwards.

    With `batch_invariant` the fastest one on a CPU whose rows, from two on, do not depend on their number.
    """
    if packs(weight.dtype, weight.device):
        differs = batch_invariant and torch.cpu._is_amx_tile_supported()
        return PackedLinear(weight, bias, rows=_AMX_ROWS if differs else None)
    return (BlockLinear if batch_invariant else PlainLinear)(weight, bias)
