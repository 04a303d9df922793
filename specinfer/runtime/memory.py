"""How many KV cache blocks fit; what does not fit is refused with the arithmetic shown."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from specinfer.errors import CapacityError
from specinfer.kernels.machine import cgroup_free_memory
from specinfer.models.config import ModelConfig
from specinfer.runtime.kv_cache import KvCache

SHARE_OF_FREE = 0.5  # of the free memory goes to the KV cache at most; activations and others need the rest
GIB = 1 << 30


def free_bytes(device: torch.device) -> int:
    """The memory of `device` nobody uses, on a CPU within what the process's container may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free, allowed = int(psutil.virtual_memory().available), cgroup_free_memory()
    return free if allowed is None else min(free, allowed)


def check_weights_fit(weights: dict[str, int], device: torch.device) -> None:
    """Raise CapacityError when models of these sizes in bytes do not fit into the free memory of `device`."""
    total, free = sum(weights.values()), free_bytes(device)
    if total > free:
        parts = " + ".join(f"{name} {_gib(size)}" for name, size in weights.items())
        raise CapacityError(
            f"the weights need {parts} = {_gib(total)}, but {_gib(free)} of memory are free on {device}; "
            "choose a smaller model, fewer drafts, or free some memory"
        )


def num_blocks(
    configs: Sequence[tuple[ModelConfig, torch.dtype]],
    *,
    block_size: int,
    wanted_positions: int,
    needed_positions: int,
    limit: int | None,
    device: torch.device,
) -> int:
    """How many blocks the caches of all models get: enough for `wanted_positions`, if the memory allows.

    `limit` is the caller's bytes for all KV caches; None takes a share of what is free. Raises
    CapacityError when not even `needed_positions` fit.
    """
    per_block = block_size * sum(
        KvCache.bytes_per_slot(c.num_layers, c.num_kv_heads, c.head_dim, dtype) for c, dtype in configs
    )
    free = free_bytes(device)
    if limit is not None and limit > free:
        raise CapacityError(
            f"kv_cache_memory is {_gib(limit)}, but {_gib(free)} are free on {device} after loading the "
            "weights; lower it"
        )
    budget = limit if limit is not None else int(free * SHARE_OF_FREE)
    blocks = budget // per_block
    if limit is None:
        blocks = min(blocks, -(-wanted_positions // block_size))
    needed = -(-needed_positions // block_size)
    if blocks < needed:
        raise CapacityError(
            f"the KV cache needs at least {needed} blocks x {block_size} positions x "
            f"{per_block // block_size} bytes = {_gib(needed * per_block)}, but may take {_gib(budget)}; "
            "raise kv_cache_memory, free some memory, or choose a smaller tree"
        )
    return blocks


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"
