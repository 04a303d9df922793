"""K and V of every layer, by slot."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.errors import ensure
from specinfer.models.config import ModelConfig


class KvCache:
    """The KV cache of one model: num_slots positions, whoever they belong to.

    One tensor holds all layers, so that moving an accepted path is one gather and one scatter.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_slots, num_kv_heads, head_dim)
        self._kv_2LPKH = _zeros(shape, dtype, device)
        self.keys: tuple[Tensor, ...] = tuple(self._kv_2LPKH[0])  # per layer [num_slots, K, H]
        self.values: tuple[Tensor, ...] = tuple(self._kv_2LPKH[1])

    @classmethod
    def of(cls, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> KvCache:
        """The cache that such a model needs."""
        return cls(
            num_layers=config.num_layers,
            num_slots=num_slots,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """The bytes one cache position takes, K and V of all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    @property
    def num_slots(self) -> int:
        """How many cache positions there are."""
        return int(self._kv_2LPKH.shape[2])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` onto slots `targets`, in every layer; all are read before any is written."""
        ensure(len(sources) == len(targets), f"{len(sources)} slots onto {len(targets)}")
        if not sources:
            return
        device = self._kv_2LPKH.device
        moved = self._kv_2LPKH[:, :, torch.tensor(sources, device=device)]
        self._kv_2LPKH[:, :, torch.tensor(targets, device=device)] = moved


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in pages that take no memory before they are written, as the cache may never fill.

    Zeros, because hidden positions are read with weight 0, and 0 times whatever lay there could be NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Not by malloc: where that keeps what is freed, as in training, it writes the zeros, and takes all of it.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
