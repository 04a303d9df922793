"""A decoder's pass in one native call gives the bits of its steps, and refuses what is not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specinfer.errors import PeerLostError
from specinfer.kernels.exchange import SharedExchange, shared_file
from specinfer.models.decoder import Decoder
from specinfer.models.language_model import PassContext, PassOutput
from specinfer.runtime.batch import Rows, build_batch, chain_rows
from specinfer.runtime.kv_cache import KvCache
from specinfer.speculation_config import Quantization
from tests.kernels import library_or_skip
from tests.loading import load
from tests.parity.families import save_random

BLOCK = 16
TREE = Rows([54, 7, 20, 8, 8], 3, [4, 0], 0, [-1, 0, 0, 1, 2])


def loaded(name: str, folder: Path, quantization: Quantization = "none") -> Decoder:
    save_random(name, folder, tied=True)
    return load(folder, dtype=torch.bfloat16, quantization=quantization)


def cache_of(model: Decoder, num_blocks: int = 6) -> KvCache:
    return KvCache(model.config, num_blocks * BLOCK, model.dtype, model.device)


def read(
    model: Decoder,
    cache: KvCache,
    rows: Sequence[Rows],
    *,
    taps: Sequence[int] = (),
    steps: bool = False,
    max_logits: int = 0,
) -> PassOutput:
    batch = build_batch(rows, block_size=BLOCK, device=model.device)
    attend = model.kernels.attention.over(cache.keys, cache.values).bind(batch.paths)
    context = PassContext(batch.positions_T, attend, taps)
    if steps:
        return model.read_by_layers(batch.token_ids_T, context, batch.logit_rows, None)
    return model.read(batch.token_ids_T, context, batch.logit_rows, max_logits=max_logits)


def test_logits_come_along_where_few_rows_are_read(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    wanted = {most: read(model, cache_of(model), [TREE], max_logits=most).logits_RV for most in (0, 4, 5, 64)}
    assert [most for most, logits in wanted.items() if logits is not None] == [5, 64]
    text = chain_rows([1, 2, 3], 0, [0], logits=False)
    assert read(model, cache_of(model), [text], max_logits=64).logits_RV is None
    one = read(model, cache_of(model), [chain_rows([1, 2, 3], 0, [0], logits=True)], max_logits=1)
    assert one.logits_RV.shape == (1, 96)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rotations_become_more_as_texts_grow(name: str, tmp_path: Path) -> None:
    model = loaded(name, tmp_path)
    at_once, by_steps = cache_of(model, 100), cache_of(model, 100)
    for start in (0, 511, 512, 1024, 1500, 3):
        rows = [chain_rows([7, 8, 9], start, range(100), logits=True)]
        assert torch.equal(read(model, at_once, rows)[0], read(model, by_steps, rows, steps=True)[0]), start


def test_fewer_rotations_never_take_the_place_of_more(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    native = model._native
    read(model, cache_of(model), [TREE])
    tables = native._rotations
    tables.reach(600)
    assert native._args.num_rotations == 1, "all layers have the same"
    made = [(rotation.cos, rotation.positions) for rotation in native._args.rotations[:1]]
    tables._kept.clear()
    tables.reach(520)  # another engine's thread, which needs fewer
    assert not tables._kept
    assert [(rotation.cos, rotation.positions) for rotation in native._args.rotations[:1]] == made
    assert all(positions >= 600 for _, positions in made)


def test_what_is_not_there_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    cache = cache_of(model)
    with pytest.raises(IndexError, match=r"token ids must be 0 \.\. 95"):
        read(model, cache, [chain_rows([3, 96], 0, [0], logits=True)])
    with pytest.raises(ValueError, match=r"got taps \[4\]; allowed: 0 \.\. 3"):
        read(model, cache, [chain_rows([3], 0, [0], logits=True)], taps=[4])
    batch = build_batch([chain_rows([3, 4], 0, [0], logits=True)], block_size=BLOCK, device=model.device)
    attend = model.kernels.attention.over(cache.keys, cache.values).bind(batch.paths)
    with pytest.raises(IndexError, match="positions must be 0 or more, got -1"):
        model.read(batch.token_ids_T, PassContext(batch.positions_T - 1, attend))
    for wrong in (batch.token_ids_T[:1], batch.token_ids_T.int(), torch.arange(4)[::2]):
        with pytest.raises(ValueError, match=r"(token ids|positions) must be contiguous torch.int64 \[2\]"):
            model.read(wrong, PassContext(batch.positions_T, attend))
        with pytest.raises(ValueError, match=r"(token ids|positions) must be contiguous torch.int64 \[2\]"):
            model.read(batch.token_ids_T, PassContext(wrong, attend))
    assert all(not part.any() for part in (*cache.keys, *cache.values))


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    good = cache_of(model)
    rows = [chain_rows([3, 4], 0, [0], logits=True)]
    for keys, values, fault in (
        (good.keys[1:], good.values[1:], "caches of 2 layers for a model of 3"),
        ([k.float() for k in good.keys], [v.float() for v in good.values], "of torch.float32"),
        ([k[..., :2].contiguous() for k in good.keys],) * 2 + ("heads of 2 of",),
    ):
        attention = model.kernels.attention.over(keys, values)
        batch = build_batch(rows, block_size=BLOCK, device=model.device)
        for _ in range(2):  # that a good one was met does not make it one
            context = PassContext(batch.positions_T, attention.bind(batch.paths))
            with pytest.raises(ValueError, match=fault):
                model.read(batch.token_ids_T, context, batch.logit_rows)
            read(model, good, rows)


def test_a_pass_ends_at_the_layer_where_a_rank_is_lost(tmp_path: Path) -> None:
    """With an exchange of one rank alone its bits are those without."""
    model, library = loaded("llama", tmp_path, "int8"), library_or_skip()
    wanted = read(model, cache_of(model), [TREE]).hidden_RD
    for ranks in (1, 2):
        file = shared_file()
        exchange = SharedExchange(library, file, ranks, 0, limit=0.1)
        os.close(file)
        join(model, exchange)
        if ranks == 1:
            assert torch.equal(read(model, cache_of(model), [TREE])[0], wanted)
            assert exchange.figures().turns == 2 * 2 * model.config.num_layers
        else:
            with pytest.raises(PeerLostError, match=r"^rank 1 of 2 did not respond within 0.1 s"):
                read(model, cache_of(model), [TREE])
            assert exchange.figures().turns == 1
        exchange.close()


def join(model: Decoder, exchange: SharedExchange) -> None:
    """Let the products join that add up over heads and over the inside of an MLP."""
    layers = model._native._layers
    for parts, args in zip(layers._kept, layers.args, strict=True):
        for product, its in ((parts.products[1], args.o), (parts.products[3], args.down)):
            product.join(exchange)
            its.exchange = exchange.address
