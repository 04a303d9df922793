"""NumPy reference of heads, row by row, from their tensors' names; modules are compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.models.config import ModelConfig
from tests.oracles.rows import Array, attended, norm, rotated, silu

Weights = Mapping[str, Array]


def weights_of(module: nn.Module) -> dict[str, Array]:
    return {name: t.detach().numpy().astype(np.float64) for name, t in module.state_dict().items()}


class Layer:
    """One layer of one text, computed row by row."""

    def __init__(self, weights: Weights, number: int, body: ModelConfig) -> None:
        self._w = lambda name: weights.get(f"layers.{number}.{name}")
        self._body = body

    def _product(self, name: str, x: Array) -> Array:
        weight, bias = self._w(f"{name}.weight"), self._w(f"{name}.bias")
        return weight @ x + (0.0 if bias is None else bias)

    def normed(self, name: str, x: Array) -> Array:
        weight = self._w(f"{name}.weight")
        return norm(x, weight, self._body.norm_eps)

    def _heads(self, which: str, x: Array, position: int) -> Array:
        heads = self._product(f"self_attn.{which}_proj", x).reshape(-1, self._body.head_dim)
        weight = self._w(f"self_attn.{which}_norm.weight")
        if weight is not None:
            heads = norm(heads, weight, self._body.norm_eps)
        return rotated(heads, position, self._body.rope.theta)

    def seen(self, x: Array, position: int) -> tuple[Array, Array]:
        """Return the key and the value of one row."""
        value = self._product("self_attn.v_proj", x).reshape(-1, self._body.head_dim)
        return self._heads("k", x, position), value

    def out(self, x: Array, given: Array, position: int, seen: Sequence[tuple[Array, Array]]) -> Array:
        """Return the residual stream of one row after the layer; `seen` are its keys and values."""
        read = attended(self._heads("q", given, position), seen, self._body.attention_scale)
        x = x + self._product("self_attn.o_proj", read)
        h = self.normed("post_attention_layernorm", x)
        gate = silu(self._product("mlp.gate_proj", h))
        return x + self._product("mlp.down_proj", gate * self._product("mlp.up_proj", h))


def eagle_logits(
    weights: Weights, config: EagleConfig, text: Sequence[int], taps_TND: Array, path: Sequence[int]
) -> Array:
    """The logits behind `path`, which follows `text`, whose rows but the last have taps; one row a step."""
    eps, body = config.body.norm_eps, config.body
    layers = [Layer(weights, number, body) for number in range(body.num_layers)]
    seen: list[list[tuple[Array, Array]]] = [[] for _ in layers]
    logits = []
    feature = np.zeros(body.hidden_size)
    tokens = [*text[1:], *path]
    for row, token in enumerate(tokens):
        if row < len(text) - 1:
            taps = taps_TND[row]
            if config.fc_norm:
                taps = np.stack([norm(t, weights[f"fc_norm.{i}.weight"], eps) for i, t in enumerate(taps)])
            flat = taps.reshape(-1)
            if config.norm_before_fc:
                flat = norm(flat, weights["input_norm.weight"], eps)
            feature = weights["fc.weight"] @ flat
        x = feature
        for number, layer in enumerate(layers):
            if number == 0:
                hidden = layer.normed("hidden_norm", x)
                if config.norm_before_residual:
                    x = hidden
                embedded = layer.normed("input_layernorm", weights["embed_tokens.weight"][token])
                given = np.concatenate([embedded, hidden])
            else:
                given = layer.normed("input_layernorm", x)
            seen[number].append(layer.seen(given, row))
            x = layer.out(x, given, row, seen[number])
        read = norm(x, weights["norm.weight"], eps)
        feature = read if config.norm_output else x
        logits.append(weights["lm_head.weight"] @ read)
    return np.array(logits)


def block_hidden(weights: Weights, config: BlockConfig, taps_TND: Array, root_id: int, anchor: int) -> Array:
    """Return the output layer's input at each level of the block whose root token is at `anchor`."""
    body, eps = config.body, config.body.norm_eps
    context = [
        norm(weights["fc.weight"] @ taps.reshape(-1), weights["hidden_norm.weight"], eps)
        for taps in taps_TND[:anchor]
    ]
    ids = [root_id, *[config.mask_token_id] * (config.block_size - 1)]
    rows = [weights["embed_tokens.weight"][token] for token in ids]
    if config.reads_last:
        token = norm(rows[0], weights["entry_norm.weight"], eps)
        entered = weights["entry.weight"] @ np.concatenate([context[-1], token])
        rows = list(entered.reshape(config.block_size, -1))
    for number in range(body.num_layers):
        layer = Layer(weights, number, body)
        of_text = [layer.seen(c, position) for position, c in enumerate(context)]
        given = [layer.normed("input_layernorm", x) for x in rows]
        own = [layer.seen(g, anchor + i) for i, g in enumerate(given)]
        rows = [
            layer.out(x, given[i], anchor + i, [*of_text, *(own[: i + 1] if config.causal else own)])
            for i, x in enumerate(rows)
        ]
    read = np.array([norm(x, weights["norm.weight"], eps) for x in rows])
    return read if config.sample_from_anchor else read[1:]
