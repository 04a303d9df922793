"""What a model is to those who run it.

Shapes: T rows of a step, R of them that are chosen, D hidden size, V vocabulary, N taps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.kernels.low_rank import AdaptedRows, Adapter
from specinfer.kernels.product import Product
from specinfer.models.config import ModelConfig, PipelineStage
from specinfer.models.weight_memory import EmbeddingTable, Weights


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of some rows, x + y.

    Each norm fuses the residual add before it, so y, the last block's output, is not yet added.
    """

    x_TD: Tensor
    y_TD: Tensor | None = None  # the next norm adds it; None: nothing

    def summed(self) -> Tensor:
        """x + y as a layer finds it, [T, D]; not to be written to."""
        return self.x_TD if self.y_TD is None else self.x_TD + self.y_TD


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass brings along to all layers, besides what they compute on."""

    positions_T: Tensor  # int64: where each row's token stands in its text
    attend: Attend  # writes K and V of every row
    taps: Sequence[int] = ()  # layers whose inputs somebody wants
    adapted: AdaptedRows | None = None  # rows that have adapters; None: no row has one


class Read(NamedTuple):
    """What a pass leaves for the output layer, and what came along."""

    hidden_RD: Tensor  # what the head reads of each row that was chosen
    tapped_TND: Tensor | None = None  # the inputs of layers that have a tap
    logits_RV: Tensor | None = None  # what the head made of these rows, where they were few
    handed_TD: Tensor | None = None  # what the next pipeline stage is given, where this is not the last


class LanguageModel(ABC):
    """Rows of tokens in, logits out; it knows neither requests nor caches.

    A pass is `read`, then `logits`.
    """

    takes_adapters: ClassVar[bool] = False  # whether rows of a pass may have some (PassContext.adapted)
    table: EmbeddingTable  # of its tokens
    output: Product  # that makes logits

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype  # of weights, activations and logits
        self.device = weights.device
        self.kernels = weights.kernels  # whoever runs a model brings attention from here
        self.group = weights.group  # of ranks that have a part of it each; None: it is whole
        self.adapter: Adapter | None = None  # of every row of every pass; None: rows have those of requests
        self.number = 0  # among the models that these ranks share
        self.stream = (
            weights.stream
        )  # brings the weights of some layers while a pass runs; None: all are there

    @abstractmethod
    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        most_logits: int = 0,
        given_TD: Tensor | None = None,
    ) -> Read:
        """A whole pass up to the head, of which these rows (int64; None: all) are read.

        Where no more than `most_logits` rows are read, logits may come along, which are those that `logits`
        makes. A later pipeline stage is given what the one before has handed on, which is used up; one with
        others behind it reads no rows. Raises ValueError for taps of layers the model lacks.
        """

    @abstractmethod
    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `read`, [R, V]; a rank's those of its part of the vocabulary.

        On a CPU a row's depend on that row alone, but for a draft's products, which may be loose.
        """


class LayeredModel(LanguageModel):
    """A model whose layers are ours, so that heads read what goes from one to the next.

    `embed`, `run_layers` and `final_norm` are what `read` is made of; a model that makes it in one call gives
    the bits of these steps.
    """

    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        most_logits: int = 0,
        given_TD: Tensor | None = None,
    ) -> Read:
        """A whole pass up to the head; see LanguageModel."""
        residual = self.embed(token_ids_T, context.positions_T) if given_TD is None else Residual(given_TD)
        residual, tapped_TND = self.run_layers(residual, context)
        if self.config.stage.ends:
            return Read(self.final_norm(residual, rows), tapped_TND)
        handed_TD = residual.summed()
        return Read(handed_TD[:0], tapped_TND, handed_TD=handed_TD)

    @abstractmethod
    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Residual:
        """What the first layer is given.

        Both are int64 [T]; a position is where the token stands in its text.
        """

    @abstractmethod
    def run_layers(self, residual: Residual, context: PassContext) -> tuple[Residual, Tensor | None]:
        """What the layers make of `residual`, and the inputs of those with a tap, [T, N, D].

        Tap i is hidden_states[i] in transformers' counting, before layer i's first norm; behind the last
        layer i is that layer's output. Layers of a stage are counted as the whole model's. `residual` is used
        up: its tensors may be written to.
        """

    @abstractmethod
    def final_norm(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """What the head reads of these rows (int64; None: all), [R, D]; `residual` stays as it is."""


class Taps:
    """Copies of the residual stream on its way through layers, for models that go layer by layer."""

    __slots__ = ("_ids", "tapped_TND")

    def __init__(self, ids: Sequence[int], x_TD: Tensor) -> None:
        self._ids = ids
        self.tapped_TND = x_TD.new_empty(x_TD.shape[0], len(ids), x_TD.shape[1]) if ids else None

    def see(self, layer: int, residual: Residual) -> None:
        """Copy `residual`, the input of that layer, for the taps that want it."""
        if self.tapped_TND is None:
            return
        for place, wanted in enumerate(self._ids):
            if wanted == layer:
                self.tapped_TND[:, place] = residual.summed()


def check_taps(taps: Sequence[int], stage: PipelineStage) -> None:
    """Raise ValueError for taps of layers that these lack; the number of all layers is their output."""
    seen = stage.taps(taps)
    wrong = [tap for tap in taps if tap not in seen]
    if wrong:
        raise ValueError(f"got taps {wrong}; allowed: {stage.first} .. {stage.behind - (not stage.ends)}")
