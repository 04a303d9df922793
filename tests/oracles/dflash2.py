"""A DFlash 2 head in plain NumPy, one row and one head at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def normed(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)


def turned(x: Array, positions: Array, theta: float) -> Array:
    """Rotary embeddings of heads [T, N, H]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1
    )


def convolved(x: Array, base: Array, delta: Array, group: int) -> Array:
    """Rows of one block; base is [K, D], delta [R, K, G]."""
    made = np.zeros_like(x)
    for row in range(len(x)):
        for channel in range(x.shape[1]):
            for tap in range(min(len(base), row + 1)):
                factor = base[tap, channel] + delta[row, tap, channel // group]
                made[row, channel] += factor * x[row - tap, channel]
    return made


class PlainHead:
    """The head of these tensors and this config.json, with its target's tables."""

    def __init__(self, tensors: Mapping[str, Array], c: Mapping[str, object], tables: tuple[Array, Array]):
        self.tensors, self.c, (self.embedding, self.output) = tensors, c, tables

    def number(self, name: str) -> int:
        own = self.c["dflash_config"]
        assert isinstance(own, dict)
        return int(own.get(name, self.c.get(name, 0)))

    def logits(self, text: Sequence[int], taps_TND: Array, above: Sequence[int]) -> Array:
        """Logits behind the text and the tokens `above`; `taps_TND` are those of the text but its last."""
        t, eps, size = self.tensors, float(str(self.c["rms_norm_eps"])), self.number("block_size")
        anchor = len(text) - 1
        context = normed(taps_TND.reshape(anchor, -1) @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
        x = self.embedding[[text[-1]] + [self.number("mask_token_id")] * (size - 1)]
        for layer in range(self.number("num_hidden_layers")):
            x = self._layer(f"layers.{layer}.", x, context, anchor, eps)
        read = normed(x, t["norm.weight"], eps)[1 + len(above)]
        logits = read @ self.output.T
        s = "candidate_selector."
        context_S = t[s + "predecessor_codebook"][[text[-1], *above][-1]] * (
            t[s + "hidden_projection.weight"] @ read
        )
        chosen = np.argsort(-logits)[: self.number("selector_top_k")]
        made = np.full_like(logits, -np.inf)
        made[chosen] = logits[chosen] + t[s + "successor_codebook"][chosen] @ context_S
        return made

    def _layer(self, p: str, x: Array, context: Array, anchor: int, eps: float) -> Array:
        t = self.tensors
        given = normed(x, t[p + "input_layernorm.weight"], eps)
        given, delta = self._before(p + "attention_conv.", given)
        made = self._attended(p + "self_attn.", given, context, anchor, eps)
        x = x + convolved(made, t[p + "attention_conv.base_kernel"][1], delta, self.number("conv_group_size"))
        given = normed(x, t[p + "post_attention_layernorm.weight"], eps)
        given, delta = self._before(p + "mlp_conv.", given)
        gate = given @ t[p + "mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (given @ t[p + "mlp.up_proj.weight"].T)
        made = inner @ t[p + "mlp.down_proj.weight"].T
        return x + convolved(made, t[p + "mlp_conv.base_kernel"][1], delta, self.number("conv_group_size"))

    def _before(self, p: str, x: Array) -> tuple[Array, Array]:
        base, group = self.tensors[p + "base_kernel"], self.number("conv_group_size")
        deltas = (x @ self.tensors[p + "kernel_projection.weight"].T).reshape(len(x), 2, base.shape[1], -1)
        return convolved(x, base[0], deltas[:, 0], group), deltas[:, 1]

    def _attended(self, p: str, x: Array, context: Array, anchor: int, eps: float) -> Array:
        t, size = self.tensors, self.number("head_dim")
        heads, kv_heads = self.number("num_attention_heads"), self.number("num_key_value_heads")
        theta = float(str(self.c["rope_theta"]))
        window = self.number("sliding_window") or anchor
        first = max(0, anchor - window)
        rows = np.concatenate((context[first:], x))
        places = np.arange(first, anchor + len(x), dtype=np.float64)
        q = normed((x @ t[p + "q_proj.weight"].T).reshape(-1, heads, size), t[p + "q_norm.weight"], eps)
        k = normed((rows @ t[p + "k_proj.weight"].T).reshape(-1, kv_heads, size), t[p + "k_norm.weight"], eps)
        v = (rows @ t[p + "v_proj.weight"].T).reshape(-1, kv_heads, size)
        q, k = turned(q, places[anchor - first :], theta), turned(k, places, theta)
        made = np.zeros_like(q)
        for head in range(heads):
            own = head * kv_heads // heads
            scores = q[:, head] @ k[:, own].T / size**0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            made[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, own]
        return np.asarray(made.reshape(len(x), -1) @ t[p + "o_proj.weight"].T)
