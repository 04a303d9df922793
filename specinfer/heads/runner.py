"""A head in an engine: a model over a cache of the target's blocks, texts in, guesses out.

Positions count from the start of a text even where the head has not read it: then a request's block table
begins with a later block, and its rows `shift` positions behind the text's first token.

Shapes: T rows, R of them that guess, D the head's hidden size, U tokens it can name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specinfer.attention.backend import CacheAttention
from specinfer.errors import ensure
from specinfer.heads.config import HeadConfig
from specinfer.kernels.product import Product
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LayeredModel
from specinfer.models.weight_memory import Weights
from specinfer.runtime.features import TappedRows
from specinfer.runtime.flight import inference
from specinfer.runtime.kv_cache import KvCache

Config = TypeVar("Config", bound=HeadConfig)
Text = TypeVar("Text")  # one text's share of a pass, as a kind of head wants it


class HeadPass(NamedTuple):
    """What a head has made of some texts."""

    made: Sequence[Tensor | None]  # of each text what a later pass of it is given; None: nothing
    read_RD: Tensor  # what the output layer reads of all rows that guess, text by text
    logits_RU: Tensor | None = None  # and made of it; None: it does where somebody asks (EagleModel.flight)


@dataclass(frozen=True, slots=True)
class MarkovTerm:
    """What a guess depends on of the token before it: logits W2 W1[token] to add (DSpark).

    Shapes: V tokens it reads, M its rank.
    """

    before_VM: Tensor  # W1
    named_UM: Tensor  # W2
    product: Product  # with W2, quantized where the others are

    def before(self, token_ids: Sequence[int]) -> Tensor:
        """What guesses behind these tokens know of them, float32 [R, M]."""
        ids = torch.tensor(token_ids, device=self.before_VM.device)
        return self.before_VM.index_select(0, ids).float()

    def logits(self, before_RM: Tensor) -> Tensor:
        """What is known of the tokens before, float32 [R, M], as logits to add, float32 [R, U]."""
        return self.product(before_RM.to(self.before_VM.dtype)).float()


@dataclass(frozen=True, slots=True)
class HeadCache:
    """Keys and values of a head, and attention over them."""

    block_size: int  # cache positions of a block
    kv: KvCache
    attention: CacheAttention


class HeadModel(ABC, Generic[Config, Text]):
    """A head over products and attention of the kernels; it knows neither requests nor who owns a cache."""

    def __init__(self, head: Config, weights: Weights, target: LayeredModel, ids: Sequence[int]) -> None:
        """`target` embeds tokens where the head has no embeddings; the head can name the tokens `ids`."""
        self.head: Config = head
        self.config: ModelConfig = head.body or target.config  # of its layers, or whose sizes it has
        self.ids = ids
        self.dtype = weights.dtype
        self.device = weights.device
        self.kernels = weights.kernels
        self._target = target
        self.markov: MarkovTerm | None = None
        self._embedding_VD: Tensor | None = None
        if head.body is not None and head.own_embedding:
            self._embedding_VD = weights.tensor("embed_tokens.weight")

    @abstractmethod
    def guess(self, texts: Sequence[Text], cache: HeadCache | None) -> HeadPass:
        """One pass over these texts; writes K and V of all their rows."""

    @abstractmethod
    def probe(self, rows: int, block_size: int) -> Sequence[Text]:
        """Texts of a step's pass that is to be timed, in which so many tokens are read."""

    def wait_for(self, made: HeadPass) -> None:
        """Have a pass's logits in host memory, some of them at the least."""
        assert made.logits_RU is not None
        made.logits_RU[0].cpu()

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """The tokens' embeddings, [T, D]; of a head with layers."""
        if self._embedding_VD is None:
            return self._target.embed(token_ids_T, positions_T).summed()
        return self.kernels.ops.embed(token_ids_T, self._embedding_VD, 1.0)

    def zero_states(self, count: int) -> list[TappedRows]:
        """Hidden states of so many rows to time a pass with."""
        size = count, len(self.head.taps), self.head.target_hidden_size
        return [TappedRows(torch.zeros(*size, dtype=self.dtype, device=self.device), range(count))]


Model = TypeVar("Model", bound=HeadModel[Any, Any])


class HeadRunner(Generic[Model]):
    """Runs passes of one head over the slots of its own cache; a head without attention has none."""

    def __init__(self, model: Model, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.cache: HeadCache | None = None
        if model.head.body is not None:
            kv = KvCache.of(model.config, num_blocks * block_size, model.dtype, model.device)
            attention = model.kernels.attention.over(kv.keys, kv.values)
            self.cache = HeadCache(block_size, kv, attention)

    @inference
    def guess(self, texts: Sequence[Any]) -> HeadPass:
        """One pass over these texts, each as the model's kind has them; writes K and V of all their rows."""
        return self.model.guess(texts, self.cache)

    def probe(self, rows: int, *, every_row: bool) -> None:
        """One pass as a step makes it, to be timed: from hidden states to logits, which are of all rows."""
        ensure(every_row, "a head's rows are all asked for their logits")
        self.model.wait_for(self.guess(self.model.probe(rows, self.block_size)))
