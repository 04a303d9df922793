"""Random caches and rows, and a float64 reference of attention."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specinfer.attention.backend import AlibiSpec, AttentionBackend, AttentionSpec, Paths, Rotation
from specinfer.runtime.batch import Rows, build_batch

BLOCK = 16
BLOCKS = 64


@functools.cache
def random(*shape: int, seed: int) -> Tensor:
    """Return a cached random tensor, which must not be changed; creating it is slower than attention."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scattered(first: int, count: int) -> list[int]:
    """Return `count` block numbers in random order, disjoint for disjoint ranges."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(7)).tolist()
    return order[first : first + count]


def paths_of(*rows: Rows, block: int = BLOCK) -> Paths:
    return build_batch(rows, block_size=block, device=torch.device("cpu")).paths


def written(paths: Paths) -> Tensor:
    """Return the slot of every row's K and V."""
    requests = enumerate(paths.requests_R4.tolist())
    own = [paths.slots(request)[first - end :] for request, (first, end, _, _) in requests]
    return torch.from_numpy(np.concatenate(own)).long()


def in_int8(x_PKH: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as int8, and the scale of each row and head, bfloat16."""
    scales_PK = (x_PKH.float().abs().amax(2) / 127).bfloat16()
    return torch.round(x_PKH.float() / scales_PK.float().unsqueeze(2)).to(torch.int8), scales_PK


@dataclass
class Layer:
    """One attention layer with random weights, caches and inputs; every call starts with the same cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    norms: bool = False
    rope: bool = False
    whole_norms: bool = False
    softcap: float | None = None
    alibi: bool = False
    rounded: bool = False  # biases in bfloat16, as in Falcon
    sinks: bool = False
    int8: bool = False  # the caches; `scales` are those of the last ones
    scales: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def heads(self) -> AttentionSpec:
        norm = random(2, self.num_heads * self.head_dim, seed=3).to(self.dtype)
        of_q, of_k = (self.num_heads, self.num_kv_heads) if self.whole_norms else (1, 1)
        slopes_N = torch.linspace(0.5, 0.01, self.num_heads)
        slopes_N = slopes_N.bfloat16().float() if self.rounded else slopes_N
        return AttentionSpec(
            layer=0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            q_norm=norm[0, : of_q * self.head_dim].contiguous() if self.norms else None,
            k_norm=norm[1, : of_k * self.head_dim].contiguous() if self.norms else None,
            norm_eps=1e-5,
            whole_norms=self.whole_norms,
            softcap=self.softcap,
            alibi=AlibiSpec(slopes_N, self.rounded) if self.alibi else None,
            sinks_N=random(self.num_heads, seed=6).to(self.dtype) if self.sinks else None,
        )

    def caches(self) -> tuple[Tensor, Tensor]:
        shape = (BLOCKS * BLOCK, self.num_kv_heads, self.head_dim)
        k, v = (random(*shape, seed=seed).to(self.dtype, copy=True) for seed in (1, 2))
        if not self.int8:
            return k, v
        (k, of_k), (v, of_v) = in_int8(k), in_int8(v)
        self.scales = [(of_k, of_v)]
        return k, v

    def inputs(self, paths: Paths) -> tuple[Tensor, Rotation | None]:
        """Return inputs that depend only on the slots, so that the same row can be in several batches."""
        slots = written(paths)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        qkv = random(BLOCKS * BLOCK, width, seed=4)[slots].to(self.dtype)
        angles = random(BLOCKS * BLOCK, self.head_dim // 2, seed=5)[slots]
        return qkv, Rotation(angles.cos(), angles.sin()) if self.rope else None

    def run(self, backend: AttentionBackend, paths: Paths) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention output [T, N, H] and the caches afterwards."""
        k, v = self.caches()
        qkv, rotation = self.inputs(paths)
        out = backend.over([k], [v], self.scales).bind(paths)(self.heads, qkv, rotation)
        return out.view(len(qkv), self.num_heads, self.head_dim), k, v

    def oracle(self, paths: Paths) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the same row by row in float64."""
        k, v = self.caches()
        if self.int8:
            k, v = (x.float() * s.unsqueeze(-1) for x, s in zip((k, v), self.scales[0], strict=True))
        k, v = k.double(), v.double()
        qkv, rotation = self.inputs(paths)
        n, kv = self.num_heads, self.num_kv_heads
        heads = qkv.double().view(len(qkv), n + 2 * kv, self.head_dim).clone()
        heads[:, :n] = self._rotated(heads[:, :n], self.heads.q_norm, rotation)
        heads[:, n : n + kv] = self._rotated(heads[:, n : n + kv], self.heads.k_norm, rotation)
        slots = written(paths)
        k[slots], v[slots] = heads[:, n : n + kv], heads[:, n + kv :]
        for cache in (k, v) if self.int8 else ():
            rounded, scales = in_int8(cache[slots])
            cache[slots] = rounded.double() * scales.double().unsqueeze(-1)
        out = torch.zeros(len(qkv), n, self.head_dim, dtype=torch.float64)
        for request, (first, end, _, _) in enumerate(paths.requests_R4.tolist()):
            slots = paths.slots(request)
            for t in range(first, end):
                tail = paths.tails[paths.tail_ends[t] : paths.tail_ends[t + 1]].tolist()
                whole = [*range(paths.shared_T[t]), *tail]
                path = whole[-(self.window or 10**9) :]
                keys = torch.from_numpy(slots[path]).long()
                keys_NLH = k[keys].repeat_interleave(n // kv, 1).transpose(0, 1)
                values_NLH = v[keys].repeat_interleave(n // kv, 1).transpose(0, 1)
                scores_NL = (keys_NLH @ heads[t, :n].unsqueeze(2)).squeeze(2) * self.heads.scale
                weights_NL = self._weights(scores_NL, len(whole))
                out[t] = (weights_NL.unsqueeze(2) * values_NLH).sum(1)
        return out, k, v

    def _weights(self, scores_NL: Tensor, length: int) -> Tensor:
        """Return the weights of the last keys of a path with `length` tokens."""
        cap, alibi, sinks_N = self.softcap, self.heads.alibi, self.heads.sinks_N
        if cap is not None:
            scores_NL = (scores_NL / cap).tanh() * cap
        if alibi is not None:
            positions = torch.arange(length - scores_NL.shape[1], length)
            for head, slope in enumerate(alibi.slopes_N.tolist()):
                if self.rounded:
                    biases = (slope * positions.bfloat16()).double() * self.heads.scale
                else:
                    biases = slope * (positions - (length - 1)).double()
                scores_NL[head] += biases
        powers_NL = scores_NL.exp()
        total_N = powers_NL.sum(1)
        if sinks_N is not None:
            total_N = total_N + sinks_N.double().exp()
        return powers_NL / total_N.unsqueeze(1)

    def _rotated(self, x_TNH: Tensor, norm: Tensor | None, rotation: Rotation | None) -> Tensor:
        if norm is not None:
            axes = (1, 2) if self.whole_norms else (2,)
            roots = (x_TNH.square().mean(axes, keepdim=True) + 1e-5).sqrt()
            x_TNH = x_TNH / roots * norm.double().view(-1, self.head_dim)
        if rotation is not None:
            turns = torch.complex(rotation.cos.double(), rotation.sin.double())
            points = torch.complex(*x_TNH.split(self.head_dim // 2, 2)) * turns.unsqueeze(1)
            x_TNH = torch.cat((points.real, points.imag), 2)
        return x_TNH
