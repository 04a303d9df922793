"""PartsProduct: the PyTorch twin of native products whose sums have parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.parts import Branches, SumParts
from specinfer.kernels.product import check_branches

FLOAT_ROWS: Final = 16  # rows that PyTorch multiplies at once
PartSum = Callable[[Tensor], Tensor]  # x [rows, elements of a part] -> float32 [rows, channels or more]


class PartsProduct:
    """The twin of a native product with float or int4 weights."""

    __slots__ = ("_bias", "_sums", "channels", "inner", "parts")

    def __init__(
        self, sums: Sequence[PartSum], bias: Tensor | None, parts: SumParts, channels: int, inner: int
    ) -> None:
        """`sums` are over one part each; `bias` is [channels]."""
        self._sums, self._bias = sums, bias
        self.parts, self.channels, self.inner = parts, channels, inner

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inner] -> [rows, channels] in x's dtype."""
        return self._out(self._branches(x), x.dtype)

    def branches(self, x: Tensor) -> Tensor:
        """See NativeProduct."""
        return torch.stack(self._branches(x).sums)

    def joined(self, branches: Tensor, dtype: torch.dtype) -> Tensor:
        """See NativeProduct."""
        check_branches(branches, self.parts, self.channels)
        tree = Branches[Tensor]()
        for one, parts in zip(branches, self.parts.all_branches, strict=True):
            tree.push(one, parts)
        return self._out(tree, dtype)

    def _branches(self, x: Tensor) -> Branches[Tensor]:
        tree = Branches[Tensor](self.parts.numbers.start)
        for add_up, (begin, end) in zip(self._sums, pairwise((0, *self.parts.ends)), strict=True):
            tree.push(add_up(x[:, begin:end])[:, : self.channels])
        return tree

    def _out(self, tree: Branches[Tensor], dtype: torch.dtype) -> Tensor:
        out = tree.total()
        return (out if self._bias is None else out + self._bias).to(dtype)


def float_sums(weight: Tensor) -> PartSum:
    """Float32 sums over a part of a float weight, [channels, elements].

    Adds one element after another: a library's product adds in an order that depends on the CPU and on the
    number of rows and channels.
    """
    columns = weight.float().T.contiguous().unbind()

    def add_up(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), len(weight))
        for of_rows, of_channels in zip(x.float().T.unsqueeze(2).unbind(), columns, strict=True):
            total += of_rows * of_channels
        return total

    return add_up
