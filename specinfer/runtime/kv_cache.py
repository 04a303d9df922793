"""KvCache: K and V of every layer by slot; and the number of blocks that fit into memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import resource
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from specinfer.errors import CapacityError, ensure
from specinfer.kernels.machine import cgroup_free_memory
from specinfer.models.config import ModelConfig


class KvCache:
    """The KV cache of one model, with num_slots positions.

    One tensor holds all layers, so that moving an accepted path is one gather and one scatter.
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (2, config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self._kv_2LPKH = _zeros(shape, dtype, device)
        self.keys: tuple[Tensor, ...] = tuple(self._kv_2LPKH[0])  # per layer [num_slots, K, H]
        self.values: tuple[Tensor, ...] = tuple(self._kv_2LPKH[1])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to slots `targets` in every layer; all are read before any is written."""
        ensure(len(sources) == len(targets), f"{len(sources)} slots onto {len(targets)}")
        if not sources:
            return
        device = self._kv_2LPKH.device
        moved = self._kv_2LPKH[:, :, torch.tensor(sources, device=device)]
        self._kv_2LPKH[:, :, torch.tensor(targets, device=device)] = moved


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the CPU in pages that take no memory before they are written.

    Zeros are needed because masked positions are read with weight 0, and 0 times NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Not by malloc: if it reuses freed memory, as in training, it writes the zeros and so takes all pages.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


SHARE_OF_FREE = 0.5  # maximum part of the free memory for KV caches; activations need the rest
GIB = 1 << 30


def free_bytes(device: torch.device, memory: int | None = None) -> int:
    """Return the free bytes of `device`, on a CPU within the limits of the process and of its cgroup.

    With `memory`, the limit of the whole process on a CPU, it is at most the unused rest of that. Blocks that
    PyTorch keeps on a GPU for later tensors count as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    limits = cgroup_free_memory(), address_space_left()
    free = min([int(psutil.virtual_memory().available), *(one for one in limits if one is not None)])
    return free if memory is None else max(0, min(free, memory - process_bytes()))


def address_space_left() -> int | None:
    """Return the bytes that `ulimit -v` leaves to this process; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def process_bytes() -> int:
    """Return the bytes of memory that this process uses."""
    return int(psutil.Process().memory_info().rss)


def num_blocks(
    configs: Sequence[tuple[ModelConfig, torch.dtype]],
    *,
    block_size: int,
    wanted_positions: int,
    needed_positions: int,
    limit: int | None,
    free: int,
    where: str,
) -> int:
    """Return the number of blocks of each model's cache: enough for `wanted_positions` if memory allows.

    `limit` is the maximum bytes of all KV caches; None takes a part of the `free` bytes. Errors name the
    device or host `where`. Raises CapacityError if not even `needed_positions` fit.
    """
    per_block = bytes_per_block(configs, block_size)
    if limit is not None and limit > free:
        raise CapacityError(
            f"kv_cache_memory is {gib(limit)}, but {gib(free)} are free on {where} after loading the "
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
            f"{per_block // block_size} bytes = {gib(needed * per_block)}, but may take {gib(budget)} on "
            f"{where}; raise kv_cache_memory or memory, free some memory, or choose a smaller tree"
        )
    return blocks


def bytes_per_block(configs: Sequence[tuple[ModelConfig, torch.dtype]], block_size: int) -> int:
    """Return the bytes of one block in the caches of all these models together: K and V of all layers."""
    return block_size * sum(
        2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype.itemsize for c, dtype in configs
    )


def gib(size: int) -> str:
    """Return bytes of memory as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"
