"""How many cache blocks fit, and what does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specinfer.errors import CapacityError
from specinfer.runtime import kv_cache
from tests.switched import PLAIN

CPU = torch.device("cpu")
# 2 * 2 * 2 * 8 * 4 = 256 bytes a position
CONFIG = replace(PLAIN, num_layers=2, layer_windows=(None,) * 2, num_kv_heads=2, head_dim=8)


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
