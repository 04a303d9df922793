"""A DFlash 2 head in plain NumPy, one row and one head at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.oracles.rows import Array, attended, norm, rotated, silu


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
        context = norm(taps_TND.reshape(anchor, -1) @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
        x = self.embedding[[text[-1]] + [self.number("mask_token_id")] * (size - 1)]
        for layer in range(self.number("num_hidden_layers")):
            x = self._layer(f"layers.{layer}.", x, context, anchor, eps)
        read = norm(x, t["norm.weight"], eps)[1 + len(above)]
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
        given = norm(x, t[p + "input_layernorm.weight"], eps)
        given, delta = self._before(p + "attention_conv.", given)
        made = self._attended(p + "self_attn.", given, context, anchor, eps)
        x = x + convolved(made, t[p + "attention_conv.base_kernel"][1], delta, self.number("conv_group_size"))
        given = norm(x, t[p + "post_attention_layernorm.weight"], eps)
        given, delta = self._before(p + "mlp_conv.", given)
        inner = silu(given @ t[p + "mlp.gate_proj.weight"].T) * (given @ t[p + "mlp.up_proj.weight"].T)
        made = inner @ t[p + "mlp.down_proj.weight"].T
        return x + convolved(made, t[p + "mlp_conv.base_kernel"][1], delta, self.number("conv_group_size"))

    def _before(self, p: str, x: Array) -> tuple[Array, Array]:
        base, group = self.tensors[p + "base_kernel"], self.number("conv_group_size")
        deltas = (x @ self.tensors[p + "kernel_projection.weight"].T).reshape(len(x), 2, base.shape[1], -1)
        return convolved(x, base[0], deltas[:, 0], group), deltas[:, 1]

    def _attended(self, p: str, x: Array, context: Array, anchor: int, eps: float) -> Array:
        t, size = self.tensors, self.number("head_dim")
        theta = float(str(self.c["rope_theta"]))
        window = self.number("sliding_window") or anchor
        first = max(0, anchor - window)

        def heads(which: str, row: Array, place: int) -> Array:
            found = (t[f"{p}{which}_proj.weight"] @ row).reshape(-1, size)
            return rotated(norm(found, t[f"{p}{which}_norm.weight"], eps), place, theta)

        seen = [
            (heads("k", row, place), (t[p + "v_proj.weight"] @ row).reshape(-1, size))
            for place, row in enumerate([*context[first:], *x], start=first)
        ]
        made = [attended(heads("q", row, anchor + n), seen, size**-0.5) for n, row in enumerate(x)]
        return np.asarray(np.stack(made) @ t[p + "o_proj.weight"].T)
