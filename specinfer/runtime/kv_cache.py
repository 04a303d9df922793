"""KvCache: K and V of every layer by slot; and the number of blocks that fit into memory."""

import contextlib
import math
import mmap
import resource
from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import Tensor

from specinfer.attention.cached_rows import Scales
from specinfer.errors import CapacityError, ensure
from specinfer.kernels.machine import cgroup_free_memory
from specinfer.models.config import ModelConfig


class KvCache:
    """The KV cache of one model, with num_slots positions; layers without attention have none.

    One tensor holds all layers with the same heads, so that moving an accepted path is one gather and one
    scatter; with `dtype` int8 another one holds their scales. A layer that uses the keys and values of
    another has that layer's.
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kv_2LPKH: list[Tensor] = []  # and scales, [2, L, P, K]
        # K and V of a layer, [num_slots, K, H]; empty without attention
        places: dict[int, tuple[Tensor, Tensor]] = {}
        scaled: dict[int, tuple[Tensor, Tensor]] = {}
        for (kv_heads, head_dim), layers in _layers_by_heads(config).items():
            kv_2LPKH = zeros((2, len(layers), num_slots, kv_heads, head_dim), dtype, device)
            self._kv_2LPKH.append(kv_2LPKH)
            places |= zip(layers, zip(*kv_2LPKH, strict=True), strict=True)
            if dtype is torch.int8:
                scales_2LPK = zeros((2, len(layers), num_slots, kv_heads), torch.bfloat16, device)
                self._kv_2LPKH.append(scales_2LPK)
                scaled |= zip(layers, zip(*scales_2LPK, strict=True), strict=True)
        none = self._kv_2LPKH[0].new_empty(0, config.num_kv_heads, config.head_dim)
        each = [places.get(config.cache_of(layer), (none, none)) for layer in range(config.num_layers)]
        self.keys: tuple[Tensor, ...] = tuple(k for k, _ in each)
        self.values: tuple[Tensor, ...] = tuple(v for _, v in each)
        no_scales = none.new_empty(none.shape[:2], dtype=torch.bfloat16)
        # K's and V's for each layer, [num_slots, K]; none unless rows are int8
        self.scales: Scales = tuple(
            scaled.get(config.cache_of(layer), (no_scales, no_scales))
            for layer in range(config.num_layers if scaled else 0)
        )

    @property
    def layout(self) -> str:
        """The dtypes and sizes of a slot's rows, as text."""
        return str([(str(kv.dtype), list(kv[:, :, :1].shape)) for kv in self._kv_2LPKH])

    @property
    def row_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return sum(kv[:, :, :1].nbytes for kv in self._kv_2LPKH)

    def read_rows(self, first: int, count: int) -> bytearray:
        """Return a copy of `count` slots from `first` on, in every layer."""
        data = bytearray(count * self.row_bytes)
        for kv_2LPKH, copy in self._rows(first, count, data):
            copy.copy_(kv_2LPKH)
        return data

    def write_rows(self, first: int, count: int, data: bytearray) -> None:
        """Write what `read_rows` returned to `count` slots from `first` on."""
        ensure(len(data) == count * self.row_bytes, f"{len(data)} bytes for {count} slots")
        for kv_2LPKH, copy in self._rows(first, count, data):
            kv_2LPKH.copy_(copy)

    def _rows(self, first: int, count: int, data: bytearray) -> Iterator[tuple[Tensor, Tensor]]:
        """The slots of each tensor, and the tensor of their part of `data`."""
        at, all_data = 0, torch.frombuffer(data, dtype=torch.uint8)
        for kv_2LPKH in self._kv_2LPKH:
            rows = kv_2LPKH[:, :, first : first + count]
            yield rows, all_data[at : at + rows.nbytes].view(rows.dtype).view(rows.shape)
            at += rows.nbytes

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to slots `targets` in every layer; all are read before any is written."""
        for kv_2LPKH in self._kv_2LPKH:
            move_places(kv_2LPKH, 2, sources, targets)


def _layers_by_heads(config: ModelConfig) -> dict[tuple[int, int], list[int]]:
    """The layers that write keys and values, by number and size of key-value heads.

    A model without attention has a layer, as backends learn the sizes from one.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for layer in config.attention_layers or [0]:
        if config.cache_of(layer) == layer:
            heads = config.heads_of(layer)
            found.setdefault((heads.num_kv_heads, heads.head_dim), []).append(layer)
    return found


def move_places(memory: Tensor, dim: int, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy places `sources` of a dimension to places `targets`; all are read before any is written."""
    ensure(len(sources) == len(targets), f"{len(sources)} slots onto {len(targets)}")
    if sources:
        device = memory.device
        moved = memory.index_select(dim, torch.tensor(sources, device=device))
        memory.index_copy_(dim, torch.tensor(targets, device=device), moved)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the CPU in pages that take no memory before they are written.

    Zeros are needed because masked positions are read with weight 0, and 0 times NaN is NaN.
    """
    if device.type != "cpu" or not math.prod(shape):
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
    kept_blocks: int = 0,
    needed_positions: int,
    limit: int | None,
    free: int,
    where: str,
    states: int = 0,
) -> int:
    """Return the number of blocks of each model's cache: enough for `wanted_positions` if memory allows.

    Memory beyond them has up to `kept_blocks` more, of earlier texts. `limit` is the maximum bytes of all
    caches; None takes a part of the `free` bytes. Recurrent states take `states` bytes of that. Errors name
    the device or host `where`. Raises CapacityError if not even `needed_positions` fit.
    """
    per_block = bytes_per_block(configs, block_size)
    budget = cache_budget(limit, free, where) - states
    blocks = budget // max(1, per_block)  # 0: a stage without attention
    if limit is None:
        blocks = min(blocks, -(-wanted_positions // block_size) + kept_blocks)
    needed = -(-needed_positions // block_size)
    if blocks < needed:
        raise CapacityError(
            f"the KV cache needs at least {needed} blocks x {block_size} positions x "
            f"{per_block // block_size} bytes = {gib(needed * per_block)}, but may take {gib(budget)} on "
            f"{where}; raise kv_cache_memory or memory, free some memory, or choose a smaller tree"
        )
    return blocks


def cache_budget(limit: int | None, free: int, where: str) -> int:
    """Return the bytes for caches, of these `free` ones; raises CapacityError if the `limit` is above."""
    if limit is not None and limit > free:
        raise CapacityError(
            f"kv_cache_memory is {gib(limit)}, but {gib(free)} are free on {where} after loading the "
            "weights; lower it"
        )
    return limit if limit is not None else int(free * SHARE_OF_FREE)


def bytes_per_block(configs: Sequence[tuple[ModelConfig, torch.dtype]], block_size: int) -> int:
    """Return the bytes of one block in the caches of all these models together: K and V of all layers."""
    return block_size * sum(
        2 * len(layers) * kv_heads * (head_dim * dtype.itemsize + (2 if dtype is torch.int8 else 0))
        for config, dtype in configs
        for (kv_heads, head_dim), layers in _layers_by_heads(config).items()
    )


def gib(size: int) -> str:
    """Return bytes of memory as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"
