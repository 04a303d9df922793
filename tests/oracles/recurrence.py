"""A recurrent block between its products, token by token in float64, as models/config.py states it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specinfer.kernels.recurrence import RecurrenceParts
from tests.oracles.rows import Array, silu


def values_of(parts: RecurrenceParts, made_TC: Tensor, gates_TG: Tensor | None) -> Array:
    """The rows for the last product, of a text with these rows of the first."""
    made = _array(made_TC)
    conv, taps = _array(parts.conv_CT), parts.conv_CT.shape[1]
    bias = 0.0 if parts.conv_bias_C is None else _array(parts.conv_bias_C)
    channels, values = parts.sizes.channels, parts.sizes.values
    if parts.sizes.kind == "short_conv":
        factor, gate, x = np.split(made, 3, 1)
        given = factor * x
    else:
        gate, given = made[:, :values], made[:, values : values + channels]
    padded = np.concatenate([np.zeros((taps - 1, channels)), given])
    mixed = np.stack([(padded[t : t + taps] * conv.T).sum(0) + bias for t in range(len(made))])
    if parts.sizes.kind == "short_conv":
        return mixed * gate
    mixed = silu(mixed)
    gates = made[:, values + channels :] if gates_TG is None else _array(gates_TG)
    S = np.zeros((parts.sizes.heads, parts.sizes.key_size, parts.sizes.value_size))
    out = []
    for x, g, z in zip(mixed, gates, gate, strict=True):
        y, S = _step(parts, x, g, S)
        out.append(_normed(parts, y.ravel(), z))
    return np.stack(out)


def _step(parts: RecurrenceParts, x: Array, gates: Array, S: Array) -> tuple[Array, Array]:
    """The output of a token, [N, V], and the state after it, [N, K, V]."""
    r = parts.sizes
    N, G, K = r.heads, r.groups, r.key_size
    assert parts.decay_N is not None
    assert parts.dt_bias_N is not None
    dt = np.log1p(np.exp(gates[-N:] + _array(parts.dt_bias_N)))
    if r.kind == "gated_delta":
        q, k, v = np.split(x, [G * K, 2 * G * K])
        q, k = (a / np.sqrt((a * a).sum(1, keepdims=True) + 1e-6) for a in (q.reshape(G, K), k.reshape(G, K)))
        q = q / np.sqrt(K)
    else:
        v, k, q = np.split(x, [len(x) - 2 * G * K, len(x) - G * K])
        dt = dt.clip(r.min_dt, r.max_dt)
    groups = np.arange(N) % G if r.tiled else np.arange(N) // (N // G)
    q, k = (a.reshape(G, K)[groups] for a in (q, k))
    v = v.reshape(N, -1)
    S = np.exp(dt * _array(parts.decay_N))[:, None, None] * S
    if r.kind == "gated_delta":
        d = (v - np.einsum("nkv,nk->nv", S, k)) / (1 + np.exp(-gates[:N, None]))
    else:
        d = dt[:, None] * v
    S = S + k[:, :, None] * d[:, None]
    skip = 0.0 if parts.skip_N is None else _array(parts.skip_N)[:, None]
    return np.einsum("nkv,nk->nv", S, q) + skip * v, S


def _normed(parts: RecurrenceParts, y: Array, z: Array) -> Array:
    y = y * silu(z) if parts.sizes.norm == "behind" else y
    if parts.norm_weight is not None:
        by_group = y.reshape(parts.sizes.norm_groups, -1)
        by_group = by_group / np.sqrt((by_group**2).mean(1, keepdims=True) + parts.sizes.norm_eps)
        y = (by_group.reshape(-1, len(parts.norm_weight)) * _array(parts.norm_weight)).ravel()
    return y if parts.sizes.norm == "behind" else y * silu(z)


def _array(x: Tensor) -> Array:
    made: Array = x.double().numpy()
    return made
