"""A product with a weight that lies ready for one native op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Product = Callable[[Tensor], Tensor]  # x [rows, inner] -> [rows, channels] in x's dtype


class NativeProduct:
    """A Product by one op of ours; `NativeLayers` calls the same op with the same tensors."""

    __slots__ = ("_run", "bias", "channels", "weight")

    def __init__(
        self, run: Callable[..., Tensor], weight: Sequence[Tensor], bias: Tensor | None, channels: int
    ) -> None:
        """`weight` is as the op takes it, `bias` float32 [channels]."""
        self._run = run
        self.weight = weight
        self.bias = bias
        self.channels = channels

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inner] -> [rows, channels] in x's dtype."""
        return self._run(x, *self.weight, self.bias, self.channels)
