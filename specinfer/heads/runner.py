"""Run a draft head in an engine, with a KV cache that uses the target's block tables.

Positions count from the start of a text, also if the head has not read its beginning. The request's block
table then begins with a later block, and its rows start `shift` positions after the text's first token.

Shapes: T rows, R rows with a guess, D the head's hidden size, U tokens of the draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specinfer.attention.backend import CacheAttention
from specinfer.errors import ensure
from specinfer.heads.config import LayersConfig
from specinfer.kernels.product import Product
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.layers import rope_embeddings
from specinfer.models.weight_memory import Weights
from specinfer.runtime.features import TappedRows
from specinfer.runtime.flight import Flight, inference
from specinfer.runtime.kv_cache import KvCache

Config = TypeVar("Config", bound=LayersConfig)
Text = TypeVar("Text")  # input of one text; each head kind has its own type


class HeadPass(NamedTuple):
    """Result of one pass of a head."""

    made: Sequence[Tensor | None]  # for each text the state that its next pass reads, or None
    read_RD: Tensor  # input of the output layer for the rows with a guess, text by text
    logits_RU: Tensor | None = None  # its output; None: computed on demand


@dataclass(frozen=True, slots=True)
class MarkovTerm:
    """Logits W2 W1[token] that are added for the token before a guess (DSpark).

    Shapes: V tokens of the target's vocabulary, M the rank.
    """

    before_VM: Tensor  # W1
    named_UM: Tensor  # W2
    product: Product  # multiplies by W2; quantized like the other matrices

    def before(self, token_ids: Sequence[int]) -> Tensor:
        """Return the rows of W1 for these tokens, float32 [R, M]."""
        ids = torch.tensor(token_ids, device=self.before_VM.device)
        return self.before_VM.index_select(0, ids).float()

    def logits(self, before_RM: Tensor) -> Tensor:
        """Return the logits to add, float32 [R, U], for rows of W1, float32 [R, M]."""
        return self.product(before_RM.to(self.before_VM.dtype)).float()


@dataclass(frozen=True, slots=True)
class HeadCache:
    """KV cache of a head, with attention over it."""

    block_size: int  # cache positions of a block
    kv: KvCache
    attention: CacheAttention


class HeadModel(ABC, Generic[Config, Text]):
    """A head computed with the kernels; independent of requests and of the cache's owner."""

    def __init__(self, head: Config, weights: Weights, target: Decoder, ids: Sequence[int]) -> None:
        """`target` embeds tokens if the head has no embeddings. `ids` is the draft vocabulary."""
        self.head: Config = head
        self.config: ModelConfig = head.body
        self.ids = ids
        self.dtype = weights.dtype
        self.device = weights.device
        self.kernels = weights.kernels
        self._ropes = rope_embeddings(head.body, self.device)
        self._target = target
        self.markov: MarkovTerm | None = None
        self._embedding_VD: Tensor | None = None
        if head.own_embedding:
            self._embedding_VD = weights.tensor("embed_tokens.weight")

    @abstractmethod
    def guess(self, texts: Sequence[Text], cache: HeadCache) -> HeadPass:
        """Run one pass over these texts; writes K and V of all their rows to `cache`."""

    @abstractmethod
    def probe(self, rows: int, block_size: int) -> Sequence[Text]:
        """Return the input of a pass that reads `rows` tokens, for timing."""

    @abstractmethod
    def logits(self, h_RD: Tensor) -> Tensor:
        """Return logits over the draft vocabulary, [R, U], without the Markov term."""

    def first_logits(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """`logits` of the first `count` tokens alone; None if the head always makes all."""
        return None

    def cache(self, num_blocks: int, block_size: int, target: KvCache | None) -> HeadCache:
        """Return a cache of `num_blocks` blocks; `target` is the target's."""
        kv = KvCache(self.config, num_blocks * block_size, self.dtype, self.device)
        return HeadCache(block_size, kv, self.kernels.attention.over(kv.keys, kv.values))

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the tokens' embeddings [T, D]."""
        if self._embedding_VD is None:
            return self._target.embed(token_ids_T, positions_T).summed()
        return self.kernels.ops.embed(token_ids_T, self._embedding_VD, 1.0)

    def zero_states(self, count: int) -> list[TappedRows]:
        """Return `count` rows of zero hidden states, for timing."""
        size = count, len(self.head.taps), self.head.target_hidden_size
        return [TappedRows(torch.zeros(*size, dtype=self.dtype, device=self.device), range(count))]


Model = TypeVar("Model", bound=HeadModel[Any, Any])


class HeadRunner(Generic[Model]):
    """Runs passes of one head with its KV cache, or with the target's."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        target: KvCache | None = None,
        shortlist: int | None = None,
    ) -> None:
        """A pass may make the logits of its first `shortlist` tokens instead of all."""
        self.model = model
        self.block_size = block_size
        self.cache = model.cache(num_blocks, block_size, target)
        few = None if shortlist is None else model.first_logits(shortlist)
        self.shortlist = None if few is None else shortlist  # None: it makes all
        self._few = few

    @inference
    def guess(self, texts: Sequence[Any]) -> HeadPass:
        """Run one pass over texts of the model's input type; writes K and V of all their rows."""
        return self.model.guess(texts, self.cache)

    def flight(self, made: HeadPass, *, few: bool = False) -> Flight:
        """Return a Flight with the logits of a pass; with `few`, those of the shortlist, if there is one."""
        model, head, vocab = self.model, self._few, self.shortlist
        if not few or head is None or vocab is None:
            head, vocab = model.logits, len(model.ids)
        return Flight(made.read_RD, head, vocab, model.kernels.scan, logits_RV=made.logits_RU)

    def probe(self, rows: int, *, every_row: bool) -> None:
        """Run one pass of `rows` rows, from hidden states to the logits of all rows, for timing."""
        ensure(every_row, "a head computes the logits of every row")
        self.flight(self.guess(self.model.probe(rows, self.block_size)), few=True).row(0)
