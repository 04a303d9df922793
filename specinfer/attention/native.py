"""Attention by the ops of kernels/cpu/rope.cpp and attention.cpp: slots are read where they lie.

A row's result is a function of its own path, to the last bit, whatever rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.backend import Attend, Heads, Paths, Rotation

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


class NativeAttention:
    """The AttentionBackend of a CPU; `kernels.build.load_library` comes before it."""

    __slots__ = ("_attend", "_store")

    def __init__(self) -> None:
        ops = torch.ops.specinfer
        self._store: Callable[..., Tensor] = ops.rope_and_store.default
        self._attend: Callable[..., Tensor] = ops.tree_attention.default

    def bind(self, paths: Paths, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Attend:
        """Attention of one pass over a cache of bfloat16 or float32."""
        path_tensors = [
            torch.from_numpy(x)
            for x in (paths.slots, paths.requests, paths.shared_T, paths.tail_ends, paths.tails)
        ]
        write_slots_T = torch.from_numpy(paths.write_slots_T)

        def attend(heads: Heads, qkv_TC: Tensor, rotation: Rotation | None) -> Tensor:
            k_PKH, v_PKH = keys[heads.layer], values[heads.layer]
            cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
            norms = heads.q_norm_H, heads.k_norm_H, heads.norm_eps
            q_TNH = self._store(qkv_TC, *norms, cos, sin, k_PKH, v_PKH, write_slots_T)
            attended_TNH = self._attend(q_TNH, k_PKH, v_PKH, *path_tensors, heads.scale, heads.window or 0)
            return attended_TNH.flatten(1)

        return attend
