"""Attention through torch's scaled_dot_product_attention, one call per request: any dtype, any device.

Shapes: T rows, S cache positions, P slots, N query heads, K key-value heads, G = N / K, H head size.
The G query heads that share a key-value head are laid under one another as G * T rows, so K and V are never
repeated, and where a request's slots are a slice they are read where they lie.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import AttentionBatch, Segment


class SdpaBackend:
    """The AttentionBackend that runs everywhere; a pure function without state."""

    __slots__ = ()

    def attend(
        self,
        q_TNH: Tensor,
        k_cache_PKH: Tensor,
        v_cache_PKH: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        windowed: bool,
    ) -> Tensor:
        """The attended values, [T, N, H]; scores are q k * scale + mask."""
        segments = batch.segments
        if len(segments) == 1:
            return _attend(q_TNH, k_cache_PKH, v_cache_PKH, segments[0], scale, windowed)
        return torch.cat(
            [_attend(q_TNH[s.rows], k_cache_PKH, v_cache_PKH, s, scale, windowed) for s in segments]
        )


def _attend(
    q_TNH: Tensor, k_cache_PKH: Tensor, v_cache_PKH: Tensor, segment: Segment, scale: float, windowed: bool
) -> Tensor:
    rows, heads, head_dim = q_TNH.shape
    kv_heads = k_cache_PKH.shape[1]
    groups = heads // kv_heads
    slots = segment.slots_S
    if isinstance(slots, slice):
        k_SKH, v_SKH = k_cache_PKH[slots], v_cache_PKH[slots]
    else:
        k_SKH, v_SKH = k_cache_PKH.index_select(0, slots), v_cache_PKH.index_select(0, slots)
    mask_TS = segment.window_mask_TS if windowed else segment.mask_TS
    if mask_TS is not None and groups > 1:
        mask_TS = mask_TS.repeat(groups, 1)
    if rows == 1:
        q = q_TNH.reshape(1, kv_heads, groups, head_dim)
    else:
        q = q_TNH.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        q = q.reshape(1, kv_heads, groups * rows, head_dim)
    out = F.scaled_dot_product_attention(
        q, k_SKH.transpose(0, 1)[None], v_SKH.transpose(0, 1)[None], attn_mask=mask_TS, scale=scale
    )
    if rows == 1:
        return out.reshape(1, heads, head_dim)
    return out.view(kv_heads, groups, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)
