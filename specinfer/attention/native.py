"""Attention by the ops of kernels/cpu/rope.cpp and attention.cpp: slots are read where they lie.

A row's result is a function of its own path, to the last bit, whatever rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.backend import Heads, Paths, Rotation

_MOST_ELEMENTS: Final = 512  # of a head
_MOST_GROUP: Final = 96  # query heads that share a key-value head


def unsupported(head_dim: int, group: int, dtype: torch.dtype) -> str | None:
    """Why native attention cannot serve such heads, `group` of them to a key-value head; else None."""
    if head_dim > _MOST_ELEMENTS:
        return f"heads have {head_dim} elements; it takes at most {_MOST_ELEMENTS}"
    if dtype is torch.bfloat16 and head_dim % 2:
        return f"heads have {head_dim} elements; in bfloat16 it takes an even number"
    if group > _MOST_GROUP:
        return f"{group} query heads share a key-value head; it takes at most {_MOST_GROUP}"
    return None


class NativeAttend:
    """NativeAttention's Attend; kernels/layers.py takes its tensors to the same ops."""

    __slots__ = ("_attend", "_store", "keys", "paths", "values", "write_slots_T")

    def __init__(
        self,
        store: Callable[..., Tensor],
        attend: Callable[..., Tensor],
        paths: Paths,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        self._store = store
        self._attend = attend
        self.keys = list(keys)
        self.values = list(values)
        fields = paths.slots, paths.requests, paths.shared_T, paths.tail_ends, paths.tails
        self.paths = [torch.from_numpy(field) for field in fields]
        self.write_slots_T = torch.from_numpy(paths.write_slots_T)

    def __call__(self, heads: Heads, qkv_TC: Tensor, rotation: Rotation | None) -> Tensor:
        """The attended values, [T, N H]; writes K and V of every row to the layer's cache."""
        cache = self.keys[heads.layer], self.values[heads.layer]
        norms = heads.q_norm_H, heads.k_norm_H, heads.norm_eps
        turns = (None, None) if rotation is None else (rotation.cos, rotation.sin)
        q_TNH = self._store(qkv_TC, *norms, *turns, *cache, self.write_slots_T)
        return self._attend(q_TNH, *cache, *self.paths, heads.scale, heads.window or 0).flatten(1)


class NativeAttention:
    """The AttentionBackend of a CPU; `kernels.build.load_library` comes before it."""

    __slots__ = ("_attend", "_store")

    def __init__(self) -> None:
        ops = torch.ops.specinfer
        self._store: Callable[..., Tensor] = ops.rope_and_store.default
        self._attend: Callable[..., Tensor] = ops.tree_attention.default

    def bind(self, paths: Paths, keys: Sequence[Tensor], values: Sequence[Tensor]) -> NativeAttend:
        """Attention of one pass over a cache of bfloat16 or float32."""
        return NativeAttend(self._store, self._attend, paths, keys, values)
