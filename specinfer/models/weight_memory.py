"""Where a model's weights end up: a layer is built from addresses, and never reads what is there.

A layer asks for its tensors and products by name. Here they are whole tensors in ordinary memory, filled
at once. docs/map.md says what another implementation owes: one whose memory is a view of a buffer, is
filled after the layer was built, or holds a slice of each matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specinfer.kernels.choice import Kernels
from specinfer.kernels.layout import (
    FloatTable,
    FloatWeight,
    Int8Weight,
    Weight,
    empty_floats,
    empty_int4,
    empty_int8,
)
from specinfer.kernels.product import Product
from specinfer.kernels.quantized import NativeProducts
from specinfer.models.stream import LayerStream
from specinfer.models.weight_reader import READERS, WeightReader, chosen_rows

_Part = TypeVar("_Part")


class EmbeddingTable:
    """Embeddings of all tokens, [V, D]; `whole` is None where they are not in memory."""

    __slots__ = ("whole",)

    def __init__(self, whole: Tensor | None) -> None:
        self.whole = whole

    def rows(self, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """A table [N, D] that has the embeddings of these tokens, and their places in it, [T]."""
        assert self.whole is not None, "a table that is elsewhere reads its rows there"
        return self.whole, token_ids_T


class Shared(NamedTuple):
    """Parts of a model that are another's, or lie elsewhere; None: it has its own."""

    table: EmbeddingTable | None = None
    output: Product | None = None  # that makes logits


class Weights:
    """What a model under construction is built from, in its own dtype and on its own device."""

    stream: LayerStream | None = None  # of layers that are not in memory

    def __init__(
        self,
        reader: WeightReader,
        device: torch.device,
        kernels: Kernels,
        logit_ids: Sequence[int] | None = None,
        shared: Shared | None = None,
    ) -> None:
        """With `logit_ids` the output layer has these rows alone, in their order."""
        self.dtype = reader.dtype
        self.device = device
        self.kernels = kernels
        self._reader = reader
        self._logit_ids = logit_ids
        self._shared = shared or Shared()

    def tensor(self, *names: str, plus: float = 0.0) -> Tensor:
        """The tensor of that name, with `plus` added to each element; several are stacked by rows.

        Whoever builds a layer keeps it as it is, and reads it when the layer computes, not before.
        """
        tensor = torch.empty(self._reader.shape(names), dtype=self.dtype, device=self.device)
        self._reader.read(names, FloatTable(tensor))
        return tensor.add_(plus) if plus else tensor

    def table(self, name: str) -> EmbeddingTable:
        """The embedding table of that name."""
        return EmbeddingTable(self.tensor(name)) if self._shared.table is None else self._shared.table

    def linear(self, *names: str, bias: bool = False, tied: EmbeddingTable | None = None) -> Product:
        """The product with the matrix `name`.weight, and `name`.bias if asked; several are stacked.

        `tied` is the same matrix, from `table`: the output layer's, where it embeds tokens, too.
        """
        output_layer = tied is not None or names[0].startswith("lm_head")
        if output_layer and self._shared.output is not None:
            return self._shared.output
        matrices = [f"{name}.weight" for name in names]
        b = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        channels, inner = self._reader.shape(matrices)
        rows = None
        if output_layer and self._logit_ids is not None:
            rows, channels = self._logit_ids, len(self._logit_ids)
        quantization, library = self._reader.quantization, self.kernels.products.library
        if quantization == "none" and (library is None or not self._reader.keeps):
            whole = None if tied is None else tied.whole
            whole = self.tensor(*matrices) if whole is None else whole
            weight: Weight = FloatTable(whole if rows is None else chosen_rows(whole, rows))
            return self._product(weight, b, inner, channels)
        b = None if b is None else b.float()
        if quantization == "none":
            weight = empty_floats(channels, inner, self.dtype, library)
        # Rounded to 4 bits, the output layer costs a small model more than all its other matrices together.
        elif quantization == "int4" and not output_layer:
            weight = empty_int4(channels, inner, library)
        else:
            weight = empty_int8(channels, inner, library)
        return self._product(self._filled(matrices, weight, rows), b, inner, channels)

    def _filled(self, matrices: Sequence[str], weight: Weight, rows: Sequence[int] | None) -> Weight:
        """These matrices, stacked, or some rows of them; `weight` is memory of their kind and shapes."""
        self._reader.read(matrices, weight, rows)
        return weight

    def _product(self, weight: Weight, bias: Tensor | None, inner: int, channels: int) -> Product:
        """The product with a weight that lies ready."""
        products = self.kernels.products
        if isinstance(weight, FloatTable):
            return products.floats(weight.rows, bias)
        if isinstance(weight, FloatWeight):
            assert isinstance(products, NativeProducts), "PyTorch multiplies plain matrices"
            return products.laid_out(weight, bias, inner, channels)
        if isinstance(weight, Int8Weight):
            return products.int8(weight, bias, inner, channels)
        return products.int4(weight, bias, inner, channels)

    def each(self, make: Callable[[int], _Part], count: int) -> Sequence[_Part]:
        """`make(0)`, `make(1)`, ...: layers with tensors of their own, in the order in which they run."""
        if not self._reader.one_thread_each:
            return [make(number) for number in range(count)]
        with ThreadPoolExecutor(READERS, thread_name_prefix="layers") as pool:
            return [*pool.map(make, range(count))]


class PassingWeights(Weights):
    """Weights that are made, written down and dropped, one matrix at a time.

    What is built of them computes nothing.
    """

    def tensor(self, *names: str, plus: float = 0.0) -> Tensor:
        """A tensor of that shape without numbers."""
        shape = self._reader.shape(names)
        if len(shape) > 1:
            super().tensor(*names)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _product(self, weight: Weight, bias: Tensor | None, inner: int, channels: int) -> Product:
        return _computes_nothing


def _computes_nothing(x: Tensor) -> Tensor:
    raise AssertionError("a model that was built to be written down computes nothing")
