"""Shard: a rank's part of a layer: heads, MLP columns, and a part of the vocabulary.

SmolLM2's layers have 9 heads in 3 groups with one key-value head each, and an MLP of 1536. Two ranks have

    rank 0   heads 0 .. 5   key-value heads 0, 1   MLP    0 ..  767
    rank 1   heads 6 .. 8   key-value head  2      MLP  768 .. 1535

Shares need not be equal: whole key-value heads are distributed as evenly as possible. With more ranks than
key-value heads, several ranks have the same key-value head and divide its query heads. Columns are cut at
multiples of 32, the group size of quantized activations, so some heads cannot be separated from their
neighbours.

Sums of floats, over heads and over columns, have fixed parts that no shard cuts (kernels/parts.py): those
that as many ranks would have. With 8 parts, three ranks have 2, 3 and 3 eighths of an MLP; with 12 parts a
third each.

A recurrent block is divided as attention is, value heads with those of their keys; a short convolution by
channels. Ranks add up the squares of heads that have a norm together.

Layout: the assignment of layers to stages. With four ranks in two stages of 3 and 27 layers, ranks 0 and 1
share layers 0 .. 2, the embeddings and the output layer, and ranks 2 and 3 share the other layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, Self

from specinfer.errors import ConfigError
from specinfer.kernels.parts import SumParts
from specinfer.kernels.recurrence_config import GateNorm, LayerKind, Recurrence
from specinfer.models.config import LayerHeads, ModelConfig, QkNorm
from specinfer.models.ranges import InnerRange, PipelineStage, Ranges, RecurrenceRange

_GROUP: Final = 32  # columns that are rotated and quantized together (kernels/layout.py)
_ROWS: Final = 16  # interleaved rows of a matrix
_MAX_RANKS: Final = 64  # numbers of ranks that are tried for an error message


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`; float sums have `parts` parts, exact sums one."""

    rank: int
    size: int
    parts: int = 1

    def heads(self, heads: int, kv_heads: int, head_dim: int) -> tuple[range, range] | None:
        """The query heads and the key-value heads of this rank; None if it would have none."""
        group, pieces = heads // kv_heads, _pieces(heads, kv_heads, head_dim, self.parts)
        queries = _divide_heads(pieces, self.size)[self.rank]
        if queries is None:
            return None
        return queries, range(queries.start // group, -(-queries.stop // group))

    def columns(self, inner: int) -> range:
        """This rank's columns of an MLP of `inner` columns, in whole groups and parts."""
        ends = _column_ends(inner, self.parts)
        count = len(ends) - 1
        return range(*(ends[count * number // self.size] for number in (self.rank, self.rank + 1)))

    def vocab(self, vocab: int) -> range:
        """The tokens whose logits this rank computes."""
        units = -(-vocab // _ROWS)
        return range(
            *(min(units * number // self.size * _ROWS, vocab) for number in (self.rank, self.rank + 1))
        )

    def of(self, config: ModelConfig, *, whole_table: bool = False) -> ModelConfig:
        """This rank's part of a model; with `whole_table`, all embeddings. A single rank has everything.

        Raises ConfigError if a rank would have no head, or no columns of the MLP.
        """
        if config.layers_differ and (self.size, self.parts) != (1, 1):
            return self._of_layers(config, whole_table=whole_table)
        own = self.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        if own is None or not self._fits(config):
            works = [
                str(size) for size in range(1, _MAX_RANKS + 1) if Shard(0, size, self.parts)._fits(config)
            ]
            cut = f", in {self.parts} parts of sums" if self.parts > 1 else ""
            if config.recurrence is not None:
                cut += f", and recurrent layers {_shown(config.recurrence)}"
            raise ConfigError(
                f"tensor_parallel is {self.size}: with {config.num_heads} heads in {config.num_kv_heads} "
                f"groups, and an MLP of {min(_inner_sizes(config))}{cut}, a rank would have none; allowed "
                f"for this model: {', '.join(works)}, or use pipeline_parallel, which divides whole layers"
            )
        if self.size > 1 and config.qk_norm is QkNorm.WHOLE:
            raise ConfigError(
                f"tensor_parallel is {self.size}: a {config.family} model norms the queries of all heads "
                "together, which ranks cannot divide; use pipeline_parallel, which divides whole layers"
            )
        o = self._sums_over(config.num_heads, config.num_kv_heads, config.head_dim)
        down = self._column_sums(config.intermediate_size)
        experts, of_expert, of_shared = config.experts, InnerRange(), InnerRange()
        if experts is not None:
            of_expert, of_shared = self._inner(experts.size), self._inner(experts.shared_size)
        recurrence, of_recurrence = self._recurrence(config)
        if self.size == 1:
            sums = Ranges(
                o=o, down=down, experts=of_expert, shared_expert=of_shared, recurrence=of_recurrence
            )
            return config if o is None else replace(config, part=sums)
        (queries, keys), inner = own, self.columns(config.intermediate_size)
        head, vocab, alibi = config.head_dim, self.vocab(config.vocab_size), config.alibi
        if alibi is not None:
            alibi = replace(alibi, slopes=alibi.slopes[queries.start : queries.stop])
        if experts is not None:
            sizes = len(of_expert.columns or ()), len(of_shared.columns or ())
            experts = replace(experts, size=sizes[0], shared_size=sizes[1])
        return replace(
            config,
            num_heads=len(queries),
            num_kv_heads=len(keys),
            alibi=alibi,
            intermediate_size=len(inner),
            experts=experts,
            recurrence=recurrence,
            part=Ranges(
                queries=range(queries.start * head, queries.stop * head),
                keys=range(keys.start * head, keys.stop * head),
                inner=inner,
                vocab=vocab,
                table=None if whole_table else vocab,
                o=o,
                down=down,
                experts=of_expert,
                shared_expert=of_shared,
                recurrence=of_recurrence,
            ),
        )

    def _of_layers(self, config: ModelConfig, *, whole_table: bool) -> ModelConfig:
        """The same of a model whose layers differ in their heads and MLPs (Gemma 4)."""
        alike = {"global_heads": None, "shared_layers": 0, "layer_inner": (), "per_layer": None}
        alike |= {"rope": None, "local_rope": None}

        def part(heads: LayerHeads, inner: int) -> ModelConfig:
            sizes = {"num_kv_heads": heads.num_kv_heads, "intermediate_size": inner}
            own = replace(config, head_dim=heads.head_dim, **alike, **sizes)  # type: ignore[arg-type]
            return self.of(own, whole_table=whole_table)

        first = part(LayerHeads(config.head_dim, config.num_kv_heads), config.intermediate_size)
        parts = [part(config.heads_of(i), config.inner_of(i)) for i in range(config.num_layers)]
        others = config.global_heads
        if others is not None:
            others = replace(others, num_kv_heads=part(others, config.intermediate_size).num_kv_heads)
        if {one.num_heads for one in parts} != {first.num_heads}:
            groups = sorted({config.heads_of(i).num_kv_heads for i in range(config.num_layers)})
            raise ConfigError(
                f"tensor_parallel is {self.size}: layers have {groups} groups of heads, and a rank would "
                "have more heads in some layers; take a number that divides all of these, or use "
                "pipeline_parallel, which divides whole layers"
            )
        return replace(
            config,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            intermediate_size=first.intermediate_size,
            experts=first.experts,
            global_heads=others,
            layer_inner=tuple(one.intermediate_size for one in parts) if config.layer_inner else (),
            part=replace(first.part, layers=tuple(one.part for one in parts)),
        )

    @property
    def _all(self) -> list[Self]:
        return [replace(self, rank=rank) for rank in range(self.size)]

    def _fits(self, config: ModelConfig) -> bool:
        """True if each rank has a part of everything."""
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = _inner_sizes(config)
        return all(
            shard.heads(*heads) and all(map(shard.columns, sizes)) and shard.vocab(config.vocab_size)
            for shard in self._all
        ) and (config.recurrence is None or all(shard._divides(config.recurrence) for shard in self._all))

    def _divides(self, r: Recurrence) -> bool:
        """True if this rank has a part of recurrent blocks."""
        if r.kind is LayerKind.SHORT_CONV:
            return bool(self.columns(r.channels))
        return self.size == 1 or (not r.tiled and self.heads(r.heads, r.groups, r.value_size) is not None)

    def _recurrence(self, config: ModelConfig) -> tuple[Recurrence | None, RecurrenceRange]:
        """The sizes of this rank's part of recurrent blocks, and its ranges."""
        r = config.recurrence
        if r is None:
            return None, RecurrenceRange()
        if r.kind is LayerKind.SHORT_CONV:
            columns, sums = self.columns(r.channels), self._column_sums(r.channels)
            if self.size == 1:
                return r, RecurrenceRange(sums=sums)
            return replace(r, channels=len(columns)), RecurrenceRange(columns, conv=(columns,), sums=sums)
        sizes = r.heads, r.groups, r.value_size
        own, sums = self.heads(*sizes), self._sums_over(*sizes)
        if self.size == 1 or own is None:
            return r, RecurrenceRange(sums=sums)
        heads, groups = own
        values = range(heads.start * r.value_size, heads.stop * r.value_size)
        keys = range(groups.start * r.key_size, groups.stop * r.key_size)
        own_parts = [keys, keys, values] if r.kind is LayerKind.GATED_DELTA else [values, keys, keys]
        conv, first = list[range](), 0
        for part in own_parts:
            conv.append(range(first + part.start, first + part.stop))
            first += r.heads * r.value_size if part is values else r.groups * r.key_size
        all_own = [shard.heads(*sizes) for shard in self._all]
        shared = any(one is not None and one[0].start % (r.heads // r.norm_groups) for one in all_own)
        sliced = replace(
            r,
            heads=len(heads),
            groups=len(groups),
            channels=sum(map(len, conv)),
            norm_groups=max(1, r.norm_groups * len(heads) // r.heads),
        )
        if shared and r.norm is not GateNorm.NONE:
            whole = {"norm_groups": r.norm_groups, "whole_heads": r.heads, "first_head": heads.start}
            sliced = replace(sliced, **whole)  # type: ignore[arg-type]
        return sliced, RecurrenceRange(values, keys, heads, tuple(conv), sums)

    def _inner(self, size: int) -> InnerRange:
        """This rank's part of MLPs of that size."""
        return InnerRange(self.columns(size) if self.size > 1 and size else None, self._column_sums(size))

    def _sums_over(self, heads: int, groups: int, head_dim: int) -> SumParts | None:
        """The parts of the sums over heads; None if they are exact."""
        if self.parts == 1:
            return None
        pieces = [piece for group in _pieces(heads, groups, head_dim, self.parts) for piece in group]
        ends = [0, *(piece.stop * head_dim for piece in pieces)]
        all_own = [shard.heads(heads, groups, head_dim) for shard in self._all]
        begins = [own[0].start * head_dim for own in all_own if own is not None]
        return _parts(ends, begins, self.rank)

    def _column_sums(self, inner: int) -> SumParts | None:
        """The parts of the sums over columns of MLPs of that size; None if they are exact or empty."""
        if self.parts == 1 or not inner:
            return None
        begins = [shard.columns(inner).start for shard in self._all]
        return _parts(_column_ends(inner, self.parts), begins, self.rank)


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipeline stages of `width` ranks each; the ranks of a stage share each of its layers."""

    width: int
    bounds: tuple[int, ...]  # stage i has layers bounds[i] .. bounds[i + 1] - 1
    parts: int = 1  # parts of float sums; exact sums have one

    @classmethod
    def of(cls, width: int, stages: int, layers: Sequence[int], beside: int, parts: int = 1) -> Self:
        """The most even stages, by bytes per layer plus `beside` bytes in the first stage.

        Each stage has at least one layer. Raises ConfigError if there are too few layers.
        """
        count = len(layers)
        if stages > count:
            raise ConfigError(
                f"pipeline_parallel is {stages}; the model has {count} layers, and a stage needs one: "
                f"allowed: 1 to {count}"
            )
        ends = list(accumulate(layers, initial=beside))
        # Best partition that ends before each layer: its sum of squares, and the start of its last stage.
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
        return cls(width, (0, *reversed(bounds)), parts)

    def of_draft(self, config: ModelConfig, *, exact: bool) -> Self:
        """Layout of a draft on the first stage; sums have one part per rank, unless they are exact."""
        return replace(self, bounds=(0, config.num_layers), parts=1 if exact else self.width)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.width * self.stages

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> list[int]:
        """The number of layers of each stage."""
        return [behind - first for first, behind in pairwise(self.bounds)]

    def part(self, rank: int, config: ModelConfig, *, whole_table: bool = False) -> ModelConfig:
        """A rank's part of a whole model; see `Shard.of`."""
        stage, place = divmod(rank, self.width)
        config = Shard(place, self.width, self.parts).of(config, whole_table=whole_table)
        if self.stages == 1:
            return config
        first, behind = self.bounds[stage : stage + 2]
        return replace(
            config,
            num_layers=behind - first,
            layer_windows=config.layer_windows[first:behind],
            layer_kinds=config.layer_kinds[first:behind],
            layer_inner=config.layer_inner[first:behind],
            layers_without_rope=frozenset(
                i - first for i in config.layers_without_rope if first <= i < behind
            ),
            part=replace(
                config.part,
                stage=PipelineStage(first, behind, config.num_layers),
                layers=config.part.layers[first:behind],
            ),
        )


def _parts(ends: Sequence[int], begins: Sequence[int], rank: int) -> SumParts:
    """A rank's parts; `ends` bound all parts, and `begins` are the starts of the ranks' shards."""
    bounds = tuple(map(ends.index, (*begins, ends[-1])))
    own = ends[bounds[rank] : bounds[rank + 1] + 1]
    return SumParts(tuple(end - own[0] for end in own[1:]), bounds, rank)


def _shown(r: Recurrence) -> str:
    if r.kind is LayerKind.SHORT_CONV:
        return f"of {r.channels} channels"
    return f"of {r.heads} heads in {r.groups} groups{', tiled' if r.tiled else ''}"


def _inner_sizes(config: ModelConfig) -> list[int]:
    """The sizes of all kinds of MLPs in the model's layers."""
    experts = config.experts
    sizes = [config.intermediate_size, *([] if experts is None else [experts.size, experts.shared_size])]
    return [size for size in sizes if size]


def _column_ends(inner: int, parts: int) -> list[int]:
    """0, and the ends of the columns where shards may be cut."""
    units = -(-inner // _GROUP)
    count = units if parts == 1 else min(parts, units)
    return [min(units * number // count * _GROUP, inner) for number in range(count + 1)]


def _pieces(heads: int, kv_heads: int, head_dim: int, parts: int) -> list[list[range]]:
    """Inseparable query heads, by group; ranks divide a group only if they outnumber the groups."""
    group = heads // kv_heads
    # Inseparable key-value heads, as columns are cut at multiples of 32.
    together = _GROUP // math.gcd(group * head_dim, _GROUP)
    units = -(-kv_heads // together)
    count = units if parts == 1 else min(parts, units)
    ends = [min(-(-units * number // count) * together, kv_heads) * group for number in range(count + 1)]
    groups = [range(begin, end) for begin, end in pairwise(ends)]
    if together > 1 or count < kv_heads:
        return [[whole] for whole in groups]
    # Inseparable query heads, for the same reason; a group has a whole number of these.
    pair = _GROUP // math.gcd(head_dim, _GROUP)
    found, places = [], group // pair
    for number, whole in enumerate(groups):
        limit = parts * (number + 1) // count - parts * number // count
        own = places if parts == 1 else min(places, limit)
        cuts = [whole.start + places * one // own * pair for one in range(own + 1)]
        found.append([range(begin, end) for begin, end in pairwise(cuts)])
    return found


def _divide_heads(groups: Sequence[Sequence[range]], size: int) -> list[range | None]:
    """The query heads of each of `size` ranks, in whole groups or whole pieces of one; None if impossible."""
    count = len(groups)
    if size <= count:
        # The first ranks have more. Rank 0, whose cores also run the engine, measured no slower with it.
        ends = [-(-count * number // size) for number in range(size + 1)]
        return [range(groups[begin][0].start, groups[end - 1][-1].stop) for begin, end in pairwise(ends)]
    spare, more = sum(map(len, groups)) - count, size - count
    if more > spare:
        return [None] * size
    found: list[range | None] = []
    # counts pieces beyond the first of each group: each group has a rank, and the others divide these
    before = 0
    for pieces in groups:
        behind = before + len(pieces) - 1
        ranks = 1 + more * behind // spare - more * before // spare
        cuts = [len(pieces) * one // ranks for one in range(ranks + 1)]
        found += [range(pieces[begin].start, pieces[end - 1].stop) for begin, end in pairwise(cuts)]
        before = behind
    return found
