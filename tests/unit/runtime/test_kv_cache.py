"""The KV cache: moves, memory that is taken when it is used, and how many blocks fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor

from specinfer.errors import CapacityError
from specinfer.runtime import kv_cache
from specinfer.runtime.kv_cache import KvCache
from specinfer.sampling_params import SamplingParams
from tests.engines import write_tiny
from tests.kernels import kernels
from tests.switched import PLAIN, SWITCHED

CPU = torch.device("cpu")
MIB = 1 << 20
# 2 * 2 * 2 * 8 * 4 = 256 bytes a position
CONFIG = replace(PLAIN, num_layers=2, layer_windows=(None,) * 2, num_kv_heads=2, head_dim=8)


def test_moves_read_everything_before_they_write() -> None:
    config = replace(PLAIN, num_layers=2, layer_windows=(None,) * 2, num_kv_heads=1, head_dim=1, rope=None)
    cache = KvCache(config, 8, torch.float32, CPU)
    for layer in range(2):
        cache.keys[layer][:, 0, 0] = torch.arange(8) + 100 * layer
        cache.values[layer][:, 0, 0] = torch.arange(8) + 100 * layer + 50
    cache.move([3, 4, 6], [2, 3, 4])
    assert cache.keys[0].flatten().tolist() == [0, 1, 3, 4, 6, 5, 6, 7]
    assert cache.values[1].flatten().tolist() == [150, 151, 153, 154, 156, 155, 156, 157]


def test_layers_that_share_keys_have_one_cache_and_each_kind_its_size() -> None:
    config = SWITCHED["gemma4"]  # layers 3, 4 and 5 share those of 1, 1 and 2, which has a head of 24
    cache = KvCache(config, 8, torch.float32, CPU)
    assert [tuple(k.shape) for k in cache.keys[:3]] == [(8, 2, 16), (8, 2, 16), (8, 1, 24)]
    assert [cache.keys[i].data_ptr() for i in (3, 4, 5)] == [cache.keys[i].data_ptr() for i in (1, 1, 2)]
    assert kv_cache.bytes_per_block([(config, torch.float32)], 8) == 8 * 2 * 4 * (32 + 32 + 24)
    for layer in range(3):
        cache.values[layer][5] = layer + 1
    cache.move([5], [2])
    assert [v[2].max().item() for v in cache.values] == [1, 2, 3, 2, 2, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other ways")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_cache_takes_memory_where_it_is_written_only(dtype: torch.dtype) -> None:
    process = psutil.Process()
    config = replace(PLAIN, num_layers=4, layer_windows=(None,) * 4, num_heads=8, num_kv_heads=8, head_dim=64)
    slots = 512 * MIB // kv_cache.bytes_per_block([(config, dtype)], 1)
    before = process.memory_info().rss
    cache = KvCache(config, slots, dtype, CPU)
    assert process.memory_info().rss - before < 8 * MIB
    for layer in range(4):
        cache.keys[layer][:16] = 1
        cache.values[layer][:16] = 1
    cache.move([3, 4, 5], [1, 2, 3])
    # Huge pages of 2 MiB, two at an edge.
    assert process.memory_info().rss - before < 8 * MIB + 2 * 4 * 4 * MIB


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["torch", "native"])
def test_what_nobody_wrote_is_never_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    tiny = write_tiny(tmp_path, kernels(name), vocab_size=64, max_context=96)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 1, 4, 1, 5, 8], [2, 7, 1, 8, 2, 8], [2, 7]]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=20)

    def texts() -> list[tuple[int, ...]]:
        # Room for about two of the four, so that blocks change hands.
        options = {"block_size": 4, "lookup": True, "kv_cache_memory": 70_000, "max_nodes": 8}
        llm = tiny.llm(drafts=["similar"], **options)
        return [output.token_ids for _ in range(2) for output in llm.generate(prompts, params)]

    expected = texts()

    def not_numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(kv_cache, "zeros", not_numbers)
    assert texts() == expected


def blocks(free: int, **changes: int | None) -> int:
    options = {"block_size": 4, "wanted_positions": 100, "needed_positions": 10, "limit": None, **changes}
    models = [(CONFIG, torch.float32)]
    return kv_cache.num_blocks(models, free=free, where="cpu", **options)  # type: ignore[arg-type]


def test_the_cache_takes_what_is_wanted_but_no_more_than_its_share() -> None:
    assert blocks(1 << 30) == 25
    assert blocks(20 * 1024) == 10  # half of the free memory
    assert blocks(1 << 30, limit=64 * 1024) == 64  # the caller's limit


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    for free, limit, says in (
        (1 << 30, 2 * 1024, r"at least 3 blocks x 4 positions x 256 bytes = .*raise kv_cache_memory"),
        (1024, None, "may take"),
        (1 << 20, 1 << 30, r"kv_cache_memory is 1.00 GiB, but 1.00 MiB are free"),
    ):
        with pytest.raises(CapacityError, match=says):
            pytest.fail(f"{says}: {blocks(free, limit=limit)}")


def test_what_a_container_and_an_option_allow_bounds_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    monkeypatch.setattr(kv_cache, "process_bytes", lambda: 1 << 30)
    for group, memory, free in (
        *((None, None, 8 << 30), (2 << 30, None, 2 << 30), (9 << 30, None, 8 << 30), (0, None, 0)),
        *((None, 3 << 30, 2 << 30), (None, 20 << 30, 8 << 30), (None, 1 << 20, 0)),
    ):
        monkeypatch.setattr(kv_cache, "cgroup_free_memory", lambda group=group: group)
        assert kv_cache.free_bytes(CPU, memory) == free, (group, memory)


def test_blocks_that_pytorch_keeps_on_a_gpu_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 << 30)
    assert kv_cache.free_bytes(torch.device("cuda")) == 3 << 30
