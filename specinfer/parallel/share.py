"""Share: what one of several ranks has of a layer: heads, columns of MLPs, a part of the vocabulary.

Of SmolLM2's layers, 9 heads in 3 groups that share a key-value head each, and an MLP of 1536, two ranks have

    rank 0   heads 0 .. 5   key-value heads 0, 1   MLP    0 ..  767
    rank 1   heads 6 .. 8   key-value head  2      MLP  768 .. 1535

Shares need not be equal: whole key-value heads go round as evenly as they can. Where ranks are more than
these, several have the same key-value head, and share out the query heads that read it. Columns are cut at
groups of 32, in which activations are quantized, so some heads cannot be parted from their neighbours.

Layout: which layers are whose. Where four ranks are two stages of 3 and 27 layers, ranks 0 and 1 share layers
0 .. 2, the embeddings and the output layer, and ranks 2 and 3 share the other layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from specinfer.errors import ConfigError
from specinfer.models.config import ModelConfig, PipelineStage, Ranges

_GROUP: Final = 32  # columns that are rotated and quantized together (kernels/layout.py)
_ROWS: Final = 16  # of a matrix that lie side by side
_MOST: Final = 64  # ranks that are tried to find those that work


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `rank` of `size`."""

    rank: int
    size: int

    def heads(self, heads: int, kv_heads: int, head_dim: int) -> tuple[range, range] | None:
        """The query heads and the key-value heads of this rank; None where it would have none."""
        return _heads(heads, kv_heads, head_dim, self.size)[self.rank]

    def columns(self, inner: int) -> range:
        """The columns of an MLP of so many that are this rank's, in whole groups."""
        return self._part(inner, _GROUP)

    def vocab(self, vocab: int) -> range:
        """The tokens, of so many, whose logits this rank makes."""
        return self._part(vocab, _ROWS)

    def of(self, config: ModelConfig, *, whole_table: bool = False) -> ModelConfig:
        """This rank's part of a whole model, with embeddings of all tokens if asked.

        Raises ConfigError where a rank would have no head, or no columns of the MLP.
        """
        if self.size == 1:
            return config
        own = self.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        if own is None or not _fits(config, self.size):
            works = [str(size) for size in range(1, _MOST + 1) if _fits(config, size)]
            raise ConfigError(
                f"tensor_parallel is {self.size}: of {config.num_heads} heads in {config.num_kv_heads} "
                f"groups, and an MLP of {config.intermediate_size}, some rank would have none; allowed for "
                f"this model: {', '.join(works)}, and pipeline_parallel shares out whole layers"
            )
        (queries, keys), inner = own, self.columns(config.intermediate_size)
        head, vocab = config.head_dim, self.vocab(config.vocab_size)
        return replace(
            config,
            num_heads=len(queries),
            num_kv_heads=len(keys),
            intermediate_size=len(inner),
            part=Ranges(
                queries=range(queries.start * head, queries.stop * head),
                keys=range(keys.start * head, keys.stop * head),
                inner=inner,
                vocab=vocab,
                table=None if whole_table else vocab,
            ),
        )

    def _part(self, count: int, unit: int) -> range:
        units = -(-count // unit)
        first, behind = (units * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(min(first * unit, count), min(behind * unit, count))


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in pipeline stages of `width` ranks each, which share every layer of their stage."""

    width: int
    bounds: tuple[int, ...]  # stage i has layers bounds[i] .. bounds[i + 1] - 1

    @classmethod
    def of(cls, width: int, stages: int, layers: Sequence[int], beside: int) -> Layout:
        """Stages as even as can be, by the bytes of each layer, and of all `beside` them in the first stage.

        Each has a layer at the least. Raises ConfigError where the layers are too few.
        """
        count = len(layers)
        if stages > count:
            raise ConfigError(
                f"pipeline_parallel is {stages}; the model has {count} layers, and a stage needs one: "
                f"allowed: 1 to {count}"
            )
        ends = list(accumulate(layers, initial=beside))
        # Of the best way to end a stage before each layer: its sum of squares, and where that stage begins.
        best: list[tuple[float, int]] = [(end**2, 0) for end in ends]
        begins: list[list[int]] = []
        for _ in range(1, stages):
            best = [
                min(((best[j][0] + (ends[i] - ends[j]) ** 2, j) for j in range(1, i)), default=(math.inf, 0))
                for i in range(count + 1)
            ]
            begins.append([begin for _, begin in best])
        bounds = [count]
        for stage in reversed(begins):
            bounds.append(stage[bounds[-1]])
        return cls(width, (0, *reversed(bounds)))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.width * self.stages

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has."""
        return [behind - first for first, behind in pairwise(self.bounds)]

    def part(self, rank: int, config: ModelConfig, *, whole_table: bool = False) -> ModelConfig:
        """A rank's part of a whole model; see `Share.of`."""
        stage, place = divmod(rank, self.width)
        config = Share(place, self.width).of(config, whole_table=whole_table)
        if self.stages == 1:
            return config
        first, behind = self.bounds[stage : stage + 2]
        return replace(
            config,
            num_layers=behind - first,
            layer_windows=config.layer_windows[first:behind],
            part=replace(config.part, stage=PipelineStage(first, behind, config.num_layers)),
        )


def _fits(config: ModelConfig, size: int) -> bool:
    """Whether each of so many ranks has something of everything."""
    if None in _heads(config.num_heads, config.num_kv_heads, config.head_dim, size):
        return False
    shares = [Share(rank, size) for rank in range(size)]
    return all(share.columns(config.intermediate_size) and share.vocab(config.vocab_size) for share in shares)


def _heads(heads: int, kv_heads: int, head_dim: int, size: int) -> list[tuple[range, range] | None]:
    """What each of `size` ranks has of the heads: query heads and key-value heads, or None."""
    group = heads // kv_heads
    # Key-value heads that stay together, as columns are cut behind whole groups of 32.
    together = _GROUP // math.gcd(group * head_dim, _GROUP)
    units = -(-kv_heads // together)
    found: list[tuple[range, range] | None] = []
    if size <= units:
        for rank in range(size):
            # The first ranks have more: rank 0, whose cores are the engine's as well, is no slower for it.
            first, behind = (-(-units * number // size) * together for number in (rank, rank + 1))
            kv = range(first, min(behind, kv_heads))
            found.append((range(kv.start * group, kv.stop * group), kv))
        return found
    if together > 1:
        return [None] * size
    # Query heads that stay together, for the same reason; a group has a whole number of these.
    pair = _GROUP // math.gcd(head_dim, _GROUP)
    for kv_head in range(kv_heads):
        ranks = [size * number // kv_heads for number in (kv_head, kv_head + 1)]
        count, places = ranks[1] - ranks[0], group // pair
        for number in range(count):
            first, behind = (places * one // count * pair for one in (number, number + 1))
            queries = range(kv_head * group + first, kv_head * group + behind)
            found.append((queries, range(kv_head, kv_head + 1)) if queries else None)
    return found
