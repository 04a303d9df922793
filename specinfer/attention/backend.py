"""What attention is given, and what it owes.

Shapes: T rows of the step (all requests' tokens and nodes, one after another), N query heads, K key-value
heads, H head size, C = (N + 2 K) H, the width of the product that makes q, k and v, P cache slots.

Attention begins where that product ends: head norms and rotation, K and V into the cache, and the attended
values. So whatever a backend fuses, a model calls it the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paths:
    """Which cache slots every row attends to, in the order of its own text, itself last.

    A row's path is the first `shared` slots of its request's list, then the tail's entries of that list:

        a row of text      shared = its position + 1, no tail
        a node of a tree   shared = the root's position + 1, tail = its ancestors below the root and itself
    """

    slots: NDArray[np.int32]  # of every request's positions, one request after another
    requests: NDArray[np.int32]  # [requests, 4]: first row, rows, where its slots begin, how many they are
    shared_T: NDArray[np.int32]
    tail_ends: NDArray[np.int32]  # [T + 1]; tails[tail_ends[t] : tail_ends[t + 1]] are row t's
    tails: NDArray[np.int32]  # positions in the request's list, ascending
    write_slots_T: NDArray[np.int32]  # where each row's K and V go


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rope of one pass: cos and sin of every row's angles, float32 [T, H / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention of one layer, apart from its products."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a row sees the last `window` positions of its path; None: all
    q_norm_H: Tensor | None  # weights of the RMSNorm over each head, before the rotation; None: there is none
    k_norm_H: Tensor | None
    norm_eps: float


class Attend(Protocol):
    """How a model calls attention; bound to one pass and one cache, of which the model knows nothing."""

    def __call__(self, heads: Heads, qkv_TC: Tensor, rotation: Rotation | None) -> Tensor:
        """The attended values, [T, N H]; writes K and V of every row to the layer's cache."""
        ...


class CacheAttention(Protocol):
    """Attention over one cache."""

    def bind(self, paths: Paths) -> Attend:
        """Attention of one pass."""
        ...


class AttentionBackend(Protocol):
    """Computes attention along paths."""

    def over(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CacheAttention:
        """Attention over a cache: per layer K and V, [P, K, H], in the activations' dtype."""
        ...
