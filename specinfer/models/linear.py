"""Matrix products with weights laid out once for the machine they run on.

A step checks 1 to 64 rows against the same weights, so on a CPU the time is the weights' bytes over the
memory bandwidth, if the kernel can read them in order. oneDNN's packed bf16 layout gives that: 16 rows cost
what one costs, where the plain layout costs half as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# The row count the packed layout is tuned for; the middle of what a token tree holds.
_PACK_ROWS = 16


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


class PackedLinear:
    """A bf16 product on a CPU with the weight in oneDNN's packed layout; the given weight is not kept."""

    __slots__ = ("_bias", "_out", "_product", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._out = weight.shape[0]
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if x.shape[0] == 0:  # oneDNN refuses empty products
            return x.new_empty(0, self._out)
        return self._product(x, self._weight, self._bias, "none", [], "")


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this kind are packed."""
    return (
        dtype is torch.bfloat16
        and device.type == "cpu"
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for this weight [out, in] and bias [out]; drop `weight` afterwards."""
    if packs(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
