"""SdpaAttention: torch's scaled_dot_product_attention, one call per segment, for any dtype and device.

Shapes: T rows, S keys of one segment, P slots, N query heads, K key-value heads, G = N / K, L = G * T,
H head size.
The G query heads that share a key-value head are stacked as G * T rows, so K and V are not repeated.

A row's result may not depend on the other rows, or greedy text would change where two logits are close.
torch's CPU kernel needs four measures for that. It sums over S keys in an order that depends on S, so S is
padded with masked keys to whole blocks of PAD. It computes blocks of queries, and blocks of fewer than 4 with
other products, so these are padded. It gives each block to one thread, but divides a single block among all
threads, so a single block is computed twice. A node after siblings has its ancestors at other indices than in
a chain, so a tree is computed path by path, each as a segment that is a chain. On GPUs, where this
independence is not guaranteed, a tree is one segment with a mask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.backend import Attend, AttentionSpec, Paths, Rotation
from specinfer.attention.cached_rows import CachedRows, Scales, cached_rows

PAD = 512  # the block of keys in torch's CPU kernel
# The smallest of the kernel's query block sizes (32, 64, 256), which divides the others.
_QUERY_BLOCK = 32
_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows of one request, their keys, and the mask of the keys that each row attends to."""

    rows: NDArray[np.int64]
    slots_S: NDArray[np.int32]
    sees_TS: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SdpaCache:
    """Keys and values of one cache."""

    keys: Sequence[CachedRows]
    values: Sequence[CachedRows]

    def bind(self, paths: Paths) -> Attend:
        """Return the attention of one pass; masks are made once for all layers."""
        by_paths = self.keys[0].rows_PKH.device.type == "cpu"
        return _Bound(paths, list(_segments(paths, by_paths=by_paths)), self.keys, self.values)


class SdpaAttention:
    """AttentionBackend for every device."""

    __slots__ = ()

    def over(self, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Scales = ()) -> SdpaCache:
        """Return the attention over a cache of any dtype, on any device."""
        return SdpaCache(*cached_rows(keys, values, scales))


class _Bound:
    """Attention of one pass over one cache."""

    def __init__(
        self,
        paths: Paths,
        segments: list[_Segment],
        keys: Sequence[CachedRows],
        values: Sequence[CachedRows],
    ) -> None:
        self._segments = segments
        self._keys = keys
        self._values = values
        device = keys[0].rows_PKH.device
        written = [
            paths.slots(request)[first - end :]
            for request, (first, end, _, _) in enumerate(paths.requests_R4.tolist())
        ]
        self._write_slots = torch.from_numpy(np.concatenate(written)).to(device, torch.int64)
        self._rows = [torch.from_numpy(s.rows).to(device) for s in segments]
        self._slots = [torch.from_numpy(_padded(s.slots_S)).to(device) for s in segments]
        self._masks: dict[int | None, list[Tensor]] = {}  # by window

    def __call__(self, heads: AttentionSpec, qkv_TC: Tensor, rotation: Rotation | None) -> Tensor:
        rows, n, k = qkv_TC.shape[0], heads.num_heads, heads.num_kv_heads
        qkv = qkv_TC.view(rows, n + heads.kv_matrices * k, -1)
        q_TNH, k_TKH, v_TKH = qkv[:, :n], qkv[:, n : n + k], qkv[:, qkv.shape[1] - k :]
        keys, values = self._keys[heads.layer], self._values[heads.layer]
        whole, size = heads.whole_norms, (heads.head_dim,)
        if heads.kv_matrices:
            k_TKH = rotated(k_TKH, heads.k_norm, heads.norm_eps, rotation, whole=whole)
            keys.write(self._write_slots, k_TKH)
            if heads.value_norm:
                v_TKH = F.rms_norm(v_TKH.float(), size, None, heads.norm_eps).to(v_TKH.dtype)
            values.write(self._write_slots, v_TKH)
        q_TNH = rotated(q_TNH, heads.q_norm, heads.norm_eps, rotation, whole=whole)
        out_TNH = torch.empty_like(q_TNH)
        if not heads.plain:
            for segment in self._segments:
                _attend_otherwise(heads, segment, q_TNH, keys, values, out_TNH)
            return out_TNH.flatten(1)
        masks = self._masks_for(heads.window, qkv_TC.dtype)
        for where, slots, mask in zip(self._rows, self._slots, masks, strict=True):
            k_SKH, v_SKH = (kind.read(slots, qkv_TC.dtype) for kind in (keys, values))
            out_TNH[where] = attended(q_TNH[where], k_SKH, v_SKH, mask, heads.scale)
        return out_TNH.flatten(1)

    def _masks_for(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        if window not in self._masks:
            device = self._keys[0].rows_PKH.device
            self._masks[window] = [_mask(s.sees_TS, window, dtype).to(device) for s in self._segments]
        return self._masks[window]


def rotated(
    x_TNH: Tensor, norm: Tensor | None, eps: float, rotation: Rotation | None, *, whole: bool = False
) -> Tensor:
    """Apply the RMSNorm, x / rms(x) * norm, and the rotation, where they are given.

    The norm is over each head, or over `whole` rows. The rotation maps the pair (a, b) at distance H / 2 to
    (a cos - b sin, b cos + a sin). All of it is computed in float32 and rounded once.
    """
    if norm is None and rotation is None:
        return x_TNH
    x = x_TNH.float()
    if norm is not None:
        rows = x.flatten(1) if whole else x
        x = F.rms_norm(rows, (rows.shape[-1],), norm.float(), eps).view(x.shape)
    if rotation is not None:
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]
        a, b = x.chunk(2, dim=-1)
        x = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return x.to(x_TNH.dtype)


def attended(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask_TS: Tensor, scale: float) -> Tensor:
    """Return softmax(q k * scale + mask) v, [T, N, H]."""
    rows, heads, head_dim = q_TNH.shape
    kv_heads = k_SKH.shape[1]
    groups = heads // kv_heads
    q_KLH = q_TNH.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    q_KLH = q_KLH.reshape(kv_heads, groups * rows, head_dim)
    mask_LS = mask_TS.repeat(groups, 1) if groups > 1 else mask_TS
    tail = groups * rows % _QUERY_BLOCK
    if 0 < tail < _FEW_ROWS:
        q_KLH = F.pad(q_KLH, (0, 0, 0, _FEW_ROWS - tail))
        mask_LS = F.pad(mask_LS, (0, 0, 0, _FEW_ROWS - tail))
    q_BKLH, k_BKSH, v_BKSH = q_KLH[None], k_SKH.transpose(0, 1)[None], v_SKH.transpose(0, 1)[None]
    if kv_heads == 1 and q_KLH.shape[1] <= _QUERY_BLOCK and q_KLH.is_cpu and torch.get_num_threads() > 1:
        q_BKLH, k_BKSH, v_BKSH = (x.expand(2, -1, -1, -1) for x in (q_BKLH, k_BKSH, v_BKSH))
    out_BKLH = F.scaled_dot_product_attention(q_BKLH, k_BKSH, v_BKSH, attn_mask=mask_LS, scale=scale)
    out_KGTH = out_BKLH[0, :, : groups * rows].view(kv_heads, groups, rows, head_dim)
    return out_KGTH.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def _attend_otherwise(
    heads: AttentionSpec,
    segment: _Segment,
    q_TNH: Tensor,
    keys: CachedRows,
    values: CachedRows,
    out_TNH: Tensor,
) -> None:
    """Write attention with caps, biases or sinks of a segment's rows to `out_TNH`, in float32.

    On a CPU each row is computed alone, with the keys of its path; elsewhere all together, with a mask.
    """
    sees_TS, device = segment.sees_TS, q_TNH.device
    window = _seen(sees_TS, heads.window)
    alone = device.type == "cpu"
    for row, sees_S, window_S in zip(segment.rows, sees_TS, window, strict=True) if alone else ():
        slots = torch.from_numpy(segment.slots_S[window_S])
        length = int(sees_S.sum())
        places = torch.arange(length - len(slots), length)[None]
        k_SKH, v_SKH = (kind.read(slots, q_TNH.dtype) for kind in (keys, values))
        out_TNH[row] = weighed(heads, q_TNH[row : row + 1], k_SKH, v_SKH, places, torch.tensor([[length]]))[0]
    if alone:
        return
    slots, rows = (torch.from_numpy(x).to(device) for x in (segment.slots_S, segment.rows))
    sees = torch.from_numpy(sees_TS).to(device)
    out_TNH[rows] = weighed(
        *(heads, q_TNH[rows], keys.read(slots, q_TNH.dtype), values.read(slots, q_TNH.dtype)),
        *(sees.cumsum(1) - 1, sees.sum(1, keepdim=True)),
        torch.from_numpy(window).to(device),
    )


def weighed(
    heads: AttentionSpec,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    places_TS: Tensor,
    lengths_T1: Tensor,
    sees_TS: Tensor | None = None,
) -> Tensor:
    """Return attention of rows whose scores are capped, biased or have sinks, [T, N, H].

    Keys are at `places` of each row's path of the given length; a row attends to those of `sees_TS`, or all.
    """
    rows, count, size = q_TNH.shape
    kv_heads = k_SKH.shape[1]
    q_KLH = q_TNH.float().view(rows, kv_heads, -1, size).permute(1, 2, 0, 3).flatten(1, 2)
    scores_NTS = (q_KLH @ k_SKH.float().permute(1, 2, 0) * heads.scale).view(count, rows, -1)
    if heads.softcap is not None:
        scores_NTS = torch.tanh(scores_NTS / heads.softcap) * heads.softcap
    if heads.alibi is not None:
        scores_NTS = scores_NTS + heads.alibi.biases(places_TS, lengths_T1, heads.scale)
    if sees_TS is not None:
        scores_NTS = scores_NTS.masked_fill(~sees_TS, float("-inf"))
    if heads.sinks_N is not None:
        sinks_NT1 = heads.sinks_N.float().view(-1, 1, 1).expand(-1, rows, 1)
        scores_NTS = torch.cat((scores_NTS, sinks_NT1), dim=-1)
    weights_NTS = scores_NTS.softmax(-1)[..., : len(k_SKH)]
    out_KLH = weights_NTS.reshape(kv_heads, -1, len(k_SKH)) @ v_SKH.float().transpose(0, 1)
    out_TNH = out_KLH.view(count, rows, size).transpose(0, 1)
    return out_TNH.to(q_TNH.dtype)


def _segments(paths: Paths, *, by_paths: bool) -> Iterator[_Segment]:
    for request, (first, end, _, length) in enumerate(paths.requests_R4.tolist()):
        slots = paths.slots(request)
        rows = np.arange(first, end)
        sees = np.arange(length)[None, :] < paths.shared_T[rows, None]
        ends = paths.tail_ends[first : end + 1]
        sees[np.repeat(rows - first, np.diff(ends)), paths.tails[ends[0] : ends[-1]]] = True
        if by_paths and ends[0] < ends[-1]:
            yield from _chains(_Segment(rows, slots, sees))
        else:
            yield _Segment(rows, slots, sees)


def _chains(tree: _Segment) -> Iterator[_Segment]:
    """Yield one chain per path to a leaf; a row belongs to the first path that includes it."""
    # The last key that each row attends to.
    own = tree.sees_TS.shape[1] - 1 - tree.sees_TS[:, ::-1].argmax(axis=1)
    below = tree.sees_TS[:, own] & (own[:, None] != own[None, :])  # [i, j]: row i is a descendant of row j
    taken = np.zeros(len(tree.rows), dtype=np.bool_)
    for leaf in np.flatnonzero(~below.any(axis=0)):
        if taken[leaf]:  # a repeated row
            continue
        keys = np.flatnonzero(tree.sees_TS[leaf])
        fresh = np.flatnonzero(tree.sees_TS[leaf, own] & ~taken)
        taken[fresh] = True
        yield _Segment(tree.rows[fresh], tree.slots_S[keys], tree.sees_TS[np.ix_(fresh, keys)])


def _padded(slots_S: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pad keys to whole blocks with the first slot, which every row of this request may read."""
    return np.pad(slots_S, (0, -len(slots_S) % PAD), constant_values=slots_S[0])


def _seen(sees_TS: NDArray[np.bool_], window: int | None) -> NDArray[np.bool_]:
    """Restrict each row to the last `window` keys that it attends to; None: all."""
    if window is None:
        return sees_TS
    seen: NDArray[np.bool_] = sees_TS & (sees_TS.sum(axis=1, keepdims=True) - sees_TS.cumsum(axis=1) < window)
    return seen


def _mask(sees_TS: NDArray[np.bool_], window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 where a row attends to a key and -inf elsewhere, padded to whole blocks."""
    sees_TS = _seen(sees_TS, window)
    hidden = np.ones((sees_TS.shape[0], -(-sees_TS.shape[1] // PAD) * PAD), dtype=np.bool_)
    np.logical_not(sees_TS, out=hidden[:, : sees_TS.shape[1]])
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
