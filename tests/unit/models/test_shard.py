"""Shards as tables of ranges: they cover a model without overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from specinfer.errors import ConfigError
from specinfer.kernels.parts import SumParts
from specinfer.kernels.recurrence_config import GateNorm, LayerKind, Recurrence
from specinfer.models.config import Experts, LayerHeads, ModelConfig, QkNorm
from specinfer.models.positions import Alibi
from specinfer.models.ranges import InnerRange, RecurrenceRange
from specinfer.models.shard import Layout, Shard
from tests.switched import PLAIN

SIZES: Any = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 2, "num_heads": 9},
    **{"num_kv_heads": 3, "head_dim": 64, "attention_scale": 0.125, "max_context": 64},
}
SMOL = replace(PLAIN, **SIZES, layer_windows=(None, None))


def heads(config: ModelConfig, size: int) -> list[tuple[range, range] | None]:
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    return [Shard(rank, size).heads(*sizes) for rank in range(size)]


def test_each_rank_has_columns_of_every_expert() -> None:
    mixture = replace(SMOL, experts=Experts(8, 2, 256, normalized=True, shared_size=96))
    part = Shard(1, 2).of(mixture)
    assert part.experts == Experts(8, 2, 128, normalized=True, shared_size=64)
    assert (part.part.experts, part.part.shared_expert) == (
        InnerRange(range(128, 256)),
        InnerRange(range(32, 96)),
    )
    of_one = Shard(0, 1, 4).of(mixture)
    assert of_one.experts == mixture.experts
    assert of_one.part.experts == InnerRange(None, SumParts((64, 128, 192, 256), (0, 4)))
    with pytest.raises(ConfigError, match=r"an MLP of 32, a rank would have none; allowed for this model"):
        Shard(0, 2).of(replace(mixture, experts=Experts(8, 2, 32, normalized=True)))


DELTA = Recurrence(
    kind=LayerKind.GATED_DELTA,
    taps=4,
    channels=2 * 4 * 24 + 8 * 32,
    heads=8,
    groups=4,
    key_size=24,
    value_size=32,
    norm=GateNorm.BEFORE,
    norm_groups=8,
)
MAMBA = replace(DELTA, kind=LayerKind.MAMBA2, norm=GateNorm.BEHIND, norm_groups=4)
CONV = Recurrence(kind=LayerKind.SHORT_CONV, taps=3, channels=96)


def recurrent(r: Recurrence) -> ModelConfig:
    return replace(SMOL, layer_kinds=(r.kind, LayerKind.ATTENTION), recurrence=r)


def test_value_heads_go_with_those_of_their_keys() -> None:
    values, keys, heads = range(128, 256), range(48, 96), range(4, 8)
    for r, conv in (
        (DELTA, (range(48, 96), range(144, 192), range(320, 448))),
        (MAMBA, (range(128, 256), range(304, 352), range(400, 448))),
    ):
        part = Shard(1, 2).of(recurrent(r))
        groups = r.norm_groups // 2
        assert part.recurrence == replace(r, heads=4, groups=2, channels=224, norm_groups=groups)
        assert part.part.recurrence == RecurrenceRange(values, keys, heads, conv)
    part = Shard(1, 2).of(recurrent(CONV))
    assert (part.recurrence, part.part.recurrence) == (
        replace(CONV, channels=64),
        RecurrenceRange(range(32, 96), conv=(range(32, 96),)),
    )
    bare = replace(MAMBA, groups=1, norm=GateNorm.NONE, norm_groups=1)
    part = Shard(1, 2).of(recurrent(bare))
    assert part.recurrence == replace(bare, heads=4, channels=128 + 2 * 24)
    for r, each, size in ((replace(MAMBA, groups=1, norm_groups=1), 4, 2), (MAMBA, 1, 8)):  # norms in parts
        whole = replace(recurrent(r), num_heads=16, num_kv_heads=16)
        parts = [Shard(rank, size).of(whole) for rank in (0, 1)]
        for first, part in zip((0, each), parts, strict=True):
            own = {"heads": each, "groups": 1, "channels": each * 32 + 2 * 24}
            assert part.recurrence == replace(r, **own, whole_heads=8, first_head=first)  # type: ignore[arg-type]
    of_one = Shard(0, 1, 2).of(recurrent(DELTA))
    assert of_one.recurrence == DELTA
    assert of_one.part.recurrence == RecurrenceRange(sums=SumParts((128, 256), (0, 2)))


def test_ranks_that_cannot_divide_a_recurrence_are_refused() -> None:
    for r, size, message in (
        (MAMBA, 9, "recurrent layers of 8 heads in 4 groups, a rank would have"),
        (replace(DELTA, tiled=True), 2, "of 8 heads in 4 groups, tiled"),
        (CONV, 4, "recurrent layers of 96 channels"),
    ):
        config = replace(recurrent(r), num_heads=16, num_kv_heads=16)
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{message}: {Shard(0, size).of(config)}")


@pytest.mark.few(1)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_every_head_is_one_ranks(head_dim: int) -> None:
    for count, size in product(range(1, 65), range(1, 9)):
        for kv in (one for one in range(1, count + 1) if count % one == 0):
            config = replace(SMOL, num_heads=count, num_kv_heads=kv, head_dim=head_dim)
            found = heads(config, size)
            if None in found:
                assert head_dim % 32 or size > count, "whole groups of columns can always be shared out"
                continue
            shares = [one for one in found if one is not None]
            assert [head for queries, _ in shares for head in queries] == [*range(count)]
            for queries, keys in shares:
                assert queries.start * head_dim % 32 == 0
                assert len(queries) % len(keys) == 0
                group = len(queries) // len(keys)
                whole = count // kv
                read = [head // whole for head in queries]
                assert read == [keys.start + i // group for i in range(len(queries))]
            if size <= kv:
                assert sorted(key for _, keys in shares for key in keys) == [*range(kv)]


@pytest.mark.parametrize("count", [1, 15, 16, 31, 32, 33, 48, 100, 8960, 151936])
@pytest.mark.parametrize("size", range(1, 9))
def test_every_column_and_every_token_is_one_ranks(count: int, size: int) -> None:
    for part, unit in ((Shard.columns, 32), (Shard.vocab, 16)):
        ranges = [part(Shard(rank, size), count) for rank in range(size)]
        assert [i for one in ranges for i in one] == [*range(count)]
        assert all(one.start % unit == 0 for one in ranges if one)
        sizes = [-(-len(one) // unit) for one in ranges]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.few(1)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_parts_of_sums_are_the_same_for_every_number_of_ranks(head_dim: int) -> None:
    for count, sum_parts in product((2, 9, 12, 14, 28, 40), (2, 8, 12)):
        for kv in (one for one in range(1, count + 1) if count % one == 0):
            config = replace(
                SMOL, num_heads=count, num_kv_heads=kv, head_dim=head_dim, intermediate_size=1000
            )
            whole = Shard(0, 1, sum_parts).of(config).part
            assert max(len(whole.o.ends), len(whole.down.ends)) <= sum_parts
            whole.o.check(count * head_dim)
            whole.down.check(1000)
            for size in range(2, 9):
                try:
                    ranks = [Shard(rank, size, sum_parts).of(config).part for rank in range(size)]
                except ConfigError:
                    assert head_dim % 32 or size > min(count, sum_parts)
                    continue
                for found, begins, all_of in (
                    ([one.o for one in ranks], [one.queries for one in ranks], whole.o),
                    ([one.down for one in ranks], [one.inner for one in ranks], whole.down),
                ):
                    ends = []
                    for own, begin in zip(found, begins, strict=True):
                        own.check(len(begin))
                        ends += [begin.start + end for end in own.ends]
                    assert tuple(ends) == all_of.ends


def test_sizes_that_leave_a_rank_without_a_head_are_refused_with_those_that_work() -> None:
    with pytest.raises(ConfigError) as caught:
        Shard(0, 10).of(SMOL)
    assert str(caught.value) == (
        "tensor_parallel is 10: with 9 heads in 3 groups, and an MLP of 1536, a rank would have none; "
        "allowed for this model: 1, 2, 3, 4, 5, 6, 7, 8, 9, or use pipeline_parallel, which divides "
        "whole layers"
    )
    with pytest.raises(ConfigError, match=r"of 1536, in 8 parts of sums, a rank .*: 1, 2, 3, 4, 5, 6, 7, 8,"):
        Shard(0, 9, 8).of(SMOL)
    with pytest.raises(ConfigError, match=r"allowed for this model: 1, 2,"):
        Shard(2, 3).of(replace(SMOL, intermediate_size=64))


def bounds(stages: int, layers: list[int], beside: int = 0) -> tuple[int, ...]:
    return Layout.of(1, stages, layers, beside).bounds


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_every_layer_is_one_stages_and_none_is_without(count: int) -> None:
    for stages in range(1, count + 1):
        for beside in (0, 1, 5 * count):
            found = Layout.of(2, stages, [1] * count, beside)
            assert (found.bounds[0], found.bounds[-1]) == (0, count)
            assert min(found.layers) >= 1
            assert max(found.layers[1:], default=0) - min(found.layers[1:], default=0) <= 1
            assert found.size == 2 * stages


def test_a_stage_knows_which_of_its_layers_have_no_rope() -> None:
    config = replace(SMOL, num_layers=8, layer_windows=(None,) * 8, layers_without_rope=frozenset({0, 3, 7}))
    parts = [Layout(1, (0, 3, 7, 8)).part(rank, config) for rank in range(3)]
    assert [part.layers_without_rope for part in parts] == [{0}, {0}, {0}]


def test_the_slopes_of_heads_go_with_the_heads() -> None:
    config = replace(SMOL, rope=None, alibi=Alibi.of(9))
    parts = [Shard(rank, 2).of(config).alibi for rank in range(2)]
    assert parts == [Alibi(config.alibi.slopes[:6]), Alibi(config.alibi.slopes[6:])]


def test_layers_that_differ_have_parts_of_their_own() -> None:
    differ = {"layer_windows": (5, None), "global_heads": LayerHeads(64, 2), "layer_inner": (1536, 3072)}
    config = replace(SMOL, num_heads=12, num_kv_heads=6, head_dim=32, **differ)  # type: ignore[arg-type]
    part = Shard(1, 2).of(config)
    assert (part.num_heads, part.num_kv_heads, part.global_heads) == (6, 3, LayerHeads(64, 1))
    assert part.layer_inner == (768, 1536)
    first, last = (part.part.of_layer(layer) for layer in range(2))
    assert (first.queries, last.queries) == (range(192, 384), range(384, 768))
    assert (first.keys, last.keys) == (range(96, 192), range(64, 128))
    assert (first.inner, last.inner) == (range(768, 1536), range(1536, 3072))
    assert Layout(2, (0, 1, 2)).part(3, config).part.of_layer(0) == last
    with pytest.raises(ConfigError, match=r"layers have \[2, 6\] groups of heads, and a rank"):
        Shard(0, 4).of(config)


def test_a_norm_over_all_heads_is_not_shared_out() -> None:
    config = replace(SMOL, qk_norm=QkNorm.WHOLE)
    assert Shard(0, 1).of(config) == config
    with pytest.raises(ConfigError, match="tensor_parallel is 2: a llama model norms the queries of all"):
        Shard(0, 2).of(config)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.of(1, 5, [1] * 4, 0)
    assert str(caught.value) == (
        "pipeline_parallel is 5; the model has 4 layers, and a stage needs one: allowed: 1 to 4"
    )
