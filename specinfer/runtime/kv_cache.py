"""K and V of every layer, by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
        # Not zeroed: a slot is written before anything reads it, and untouched pages cost no memory.
        self._kv_2LPKH = torch.empty(shape, dtype=dtype, device=device)
        self.keys: tuple[Tensor, ...] = tuple(self._kv_2LPKH[0])  # per layer [num_slots, K, H]
        self.values: tuple[Tensor, ...] = tuple(self._kv_2LPKH[1])

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
        assert len(sources) == len(targets), (sources, targets)
        if not sources:
            return
        device = self._kv_2LPKH.device
        moved = self._kv_2LPKH[:, :, torch.tensor(sources, device=device)]
        self._kv_2LPKH[:, :, torch.tensor(targets, device=device)] = moved
