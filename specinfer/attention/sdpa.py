"""Attention through torch's scaled_dot_product_attention, one call per segment: any dtype, any device.

Shapes: T rows, S cache positions, P slots, N query heads, K key-value heads, G = N / K,
L = G * T, H head size.
The G query heads that share a key-value head are laid under one another as G * T rows, so K and V are never
repeated, and where a request's slots are a slice they are read where they lie.

A row's result must not depend on the rows beside it. torch's CPU kernel works on blocks of queries, and a
block of fewer than 4 goes another way through its products, with other roundings: such a block is padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import AttentionBatch, Segment

# The smallest of the kernel's block sizes (32, 64, 256), which divides the others.
_QUERY_BLOCK = 32
_FEW_ROWS = 4


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
        out_TNH = torch.empty_like(q_TNH)
        for s in segments:
            out_TNH[s.rows] = _attend(q_TNH[s.rows], k_cache_PKH, v_cache_PKH, s, scale, windowed)
        return out_TNH


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
    q_KLH = q_TNH.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    q_KLH = q_KLH.reshape(kv_heads, groups * rows, head_dim)
    mask_LS = segment.window_mask_TS if windowed else segment.mask_TS
    if groups > 1:
        mask_LS = mask_LS.repeat(groups, 1)
    tail = groups * rows % _QUERY_BLOCK
    if 0 < tail < _FEW_ROWS:
        q_KLH = F.pad(q_KLH, (0, 0, 0, _FEW_ROWS - tail))
        mask_LS = F.pad(mask_LS, (0, 0, 0, _FEW_ROWS - tail))
    out_1KLH = F.scaled_dot_product_attention(
        q_KLH[None], k_SKH.transpose(0, 1)[None], v_SKH.transpose(0, 1)[None], attn_mask=mask_LS, scale=scale
    )
    out_KGTH = out_1KLH[0, :, : groups * rows].view(kv_heads, groups, rows, head_dim)
    return out_KGTH.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)
