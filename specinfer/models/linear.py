"""Matrix products with weights laid out once for the machine they run on.

A step checks 1 to 64 rows against the same weights, so on a CPU the time is the weights' bytes over the
memory bandwidth, if the kernel can read them in order. A row's result must not depend on how many rows there
are, or greedy text would change where two logits are close: on a CPU no product's does.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.choice import TORCH, Kernels


class Linear(Protocol):
    """y = x W^T + b for x [rows, in]; returns [rows, out] in x's dtype."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        ...


class PlainLinear:
    """A product with the weight as it is, whose rows may round differently beside others: on a GPU."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        return F.linear(x, self._weight, self._bias)


def make_linear(weight: Tensor, bias: Tensor | None = None, kernels: Kernels = TORCH) -> Linear:
    """The fastest product for this weight [out, in] and bias [out]; drop `weight` afterwards."""
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias)
    return kernels.products.floats(weight, bias)
