"""What an attention backend is given, and what it owes.

Shapes: T rows of the step (all requests' tokens and nodes, one after another), S cache positions of one
request, N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Some of one request's rows in a step, and what they may see.

    `mask_TS` is added to the scores: 0 where row t sees cache position s, -inf where not.
    `window_mask_TS` is the same for layers with a sliding window. S may exceed the request's positions:
    what is behind them is hidden from every row, and finite.
    """

    rows: Tensor | slice  # of the step's T rows
    slots_S: Tensor | slice  # the cache slots of positions 0..S-1; a slice where they are contiguous
    mask_TS: Tensor
    window_mask_TS: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The segments of one forward pass, each row in one of them, and where its K and V go."""

    segments: tuple[Segment, ...]
    write_slots_T: Tensor | slice  # int64; the cache slot of each row


class AttentionBackend(Protocol):
    """Computes softmax(q k * scale + mask) v per segment; a pure function of its arguments."""

    def attend(
        self,
        q_TNH: Tensor,
        k_cache_PKH: Tensor,  # P slots; the step's own K and V are already written
        v_cache_PKH: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        windowed: bool,
    ) -> Tensor:
        """The attended values, [T, N, H]."""
        ...


class Attend(Protocol):
    """How a model calls attention: write this layer's K and V, attend, return [T, N, H].

    The runner binds it to a cache, a backend and a batch, so a model knows none of them.
    """

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, windowed: bool
    ) -> Tensor:
        """The attended values of one layer, [T, N, H]."""
        ...
