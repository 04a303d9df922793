"""Ranges: a rank's or a stage's part of a model; models/shard.py computes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specinfer.kernels.parts import SumParts


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Layers first .. end - 1 of a model of `count`, on one of several pipeline stages.

    The first stage also embeds tokens, and computes logits from the last stage's output.
    """

    first: int
    end: int
    count: int

    @property
    def begins(self) -> bool:
        """True for the first stage."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """True for the last stage, which has the final norm."""
        return self.end == self.count

    def taps(self, layers: Iterable[int]) -> list[int]:
        """The given layers of the model whose inputs this stage computes; `count` means the output."""
        return [i for i in layers if self.first <= i < self.end or (self.ends and i == self.count)]


@dataclass(frozen=True, slots=True)
class InnerRange:
    """A rank's part of MLPs of one kind; None: all of it."""

    columns: range | None = None  # rows of the first matrices, and columns of the last
    sums: SumParts | None = None  # parts of float sums over these columns; None: one part


@dataclass(frozen=True, slots=True)
class RecurrenceRange:
    """A rank's part of recurrent blocks; None: all of it."""

    values: range | None = None  # rows of z and of values, and columns of the last product
    keys: range | None = None  # rows of keys and of queries
    heads: range | None = None
    conv: tuple[range, ...] | None = None  # channels of the convolution
    sums: SumParts | None = None  # parts of float sums over the last product's columns; None: one part


@dataclass(frozen=True, slots=True)
class Ranges:
    """One rank's parts of a model's matrices; None: all.

    models/shard.py computes them.
    """

    queries: range | None = None  # rows of q, and columns of o
    keys: range | None = None  # rows of k, and of v
    inner: range | None = None  # rows of an MLP's first matrices, and columns of its last
    vocab: range | None = None  # rows of the output layer
    table: range | None = None  # rows of the embeddings
    stage: PipelineStage | None = None  # layers
    # Parts of float sums over the columns of o, and of an MLP's last matrix; None: one part.
    o: SumParts | None = None
    down: SumParts | None = None
    experts: InnerRange = InnerRange()  # part of every expert of a mixture
    shared_expert: InnerRange = InnerRange()
    recurrence: RecurrenceRange = RecurrenceRange()
    layers: tuple[Ranges, ...] = ()  # parts of each layer, if heads or MLPs differ

    def of_layer(self, layer: int) -> Ranges:
        """The parts of a layer, by its number in this part of the model."""
        return self.layers[layer] if self.layers else self
