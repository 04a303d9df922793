"""LanguageModel: the interface of models for their runners.

Shapes: T rows of a step, R chosen rows, D hidden size, V vocabulary, N taps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.kernels.low_rank import AdaptedRows, Adapter
from specinfer.kernels.product import Product
from specinfer.kernels.states import StatePass
from specinfer.models.config import ModelConfig
from specinfer.models.ranges import PipelineStage
from specinfer.models.shared_sums import EmbeddingTable
from specinfer.models.weight_memory import Weights


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of some rows, x + y.

    Each norm fuses the residual add before it, so y, the last block's output, is not yet added.
    """

    x_TD: Tensor
    y_TD: Tensor | None = None  # added by the next norm; None: nothing

    def summed(self) -> Tensor:
        """x + y, the input of a layer, [T, D]; must not be modified."""
        return self.x_TD if self.y_TD is None else self.x_TD + self.y_TD


@dataclass(frozen=True, slots=True)
class PassContext:
    """Context of a pass for all layers."""

    positions_T: Tensor  # int64: position of each row's token in its text
    attend: Attend  # writes K and V of every row
    taps: Sequence[int] = ()  # layers whose inputs are returned
    adapted: AdaptedRows | None = None  # rows with adapters; None: no row has one
    states: StatePass | None = None  # of a model with recurrent layers


class PassOutput(NamedTuple):
    """Results of a pass up to the output layer."""

    hidden_RD: Tensor  # inputs of the head for each chosen row
    tapped_TND: Tensor | None = None  # inputs of tapped layers
    logits_RV: Tensor | None = None  # logits of these rows, if there are few
    stage_output_TD: Tensor | None = None  # input of the next pipeline stage, unless this is the last


class LanguageModel(ABC):
    """Computes logits for rows of tokens; has no knowledge of requests or caches.

    A pass is `read`, then `logits`.
    """

    table: EmbeddingTable  # token embeddings
    output: Product  # computes logits

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype  # dtype of weights, activations and logits
        self.device = weights.device
        self.kernels = weights.kernels  # a runner takes its attention from here
        self.group = weights.group  # ranks that share the model; None: it is whole
        self.adapter: Adapter | None = None  # adapter of all rows; None: rows have their requests' adapters
        self.number = 0  # among the models that these ranks share
        # Loads the weights of some layers during a pass; None: all are in memory.
        self.stream = weights.stream

    @abstractmethod
    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        max_logits: int = 0,
        stage_input_TD: Tensor | None = None,
    ) -> PassOutput:
        """Run a pass up to the head, and read these rows (int64; None: all).

        If at most `max_logits` rows are read, the result may include their logits, equal to those of
        `logits`. A later pipeline stage gets the previous stage's output, which it overwrites; a stage that
        is not the last reads no rows. Raises ValueError for taps of layers outside the model.
        """

    @abstractmethod
    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `read`, [R, V]; on a rank, those of its part of the vocabulary.

        On a CPU a row's logits depend on that row alone, except for a draft's products, which may be loose.
        """

    def first_logits(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """`logits` of the first `count` tokens alone; None if the model always makes all."""
        return None


def check_taps(taps: Sequence[int], stage: PipelineStage) -> None:
    """Raise ValueError for taps outside these layers; the number of layers means their output."""
    seen = stage.taps(taps)
    wrong = [tap for tap in taps if tap not in seen]
    if wrong:
        raise ValueError(f"got taps {wrong}; allowed: {stage.first} .. {stage.end - (not stage.ends)}")
