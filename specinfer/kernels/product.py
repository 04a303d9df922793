"""A product with a weight that lies ready for one native op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["bfloat16", "int8", "int4"]
Product = Callable[[Tensor], Tensor]  # x [rows, inner] -> [rows, channels] in x's dtype


class NativeProduct:
    """A Product by the op of its kind; `NativeLayers` calls the same op with the same tensors."""

    __slots__ = ("_run", "bias", "channels", "kind", "weight")

    def __init__(self, kind: Kind, weight: Sequence[Tensor], bias: Tensor | None, channels: int) -> None:
        """`weight` is as the op takes it, `bias` float32 [channels]."""
        self._run: Callable[..., Tensor] = getattr(torch.ops.specinfer, f"{kind}_linear").default
        self.kind = kind
        self.weight = weight
        self.bias = bias
        self.channels = channels

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inner] -> [rows, channels] in x's dtype."""
        return self._run(x, *self.weight, self.bias, self.channels)
