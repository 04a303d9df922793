"""An MTP layer by its definition: NumPy, one row at a time, from a file's tensors under their own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.rows import Array, attended, norm, rotated, sigmoid, silu, softmax


@dataclass(frozen=True)
class MtpLayout:
    """Names of tensors in files, and what a family's layers have."""

    layer: str  # prefix of the layer's own tensors
    token_norm: str
    hidden_norm: str
    product: str
    last_norm: str
    hidden_first: bool = False
    offset: float = 0.0  # of the weights of norms
    gated: bool = False


QWEN = MtpLayout(
    layer="mtp.layers.0",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    product="mtp.fc",
    last_norm="mtp.norm",
    offset=1.0,
    gated=True,
)
MIMO = MtpLayout(
    layer="model.mtp_layers.0",
    token_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    product="model.mtp_layers.0.input_proj",
    last_norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
)


class MtpOracle:
    """The logits of one layer; `config` is config.json of its target, whose tensors are in `tensors`, too."""

    def __init__(self, layout: MtpLayout, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self._layout, self._c = layout, config
        self._tensors = {name: np.asarray(one, dtype=np.float64) for name, one in tensors.items()}
        self._head = config["head_dim"]
        rope = config.get("rope_parameters") or config
        self._theta = rope["rope_theta"]
        self._rotated = int(self._head * rope.get("partial_rotary_factor", 1.0))

    def logits(
        self, text: Sequence[int], states_TD: Array, path: Sequence[int], *, normed: bool = True
    ) -> Array:
        """The logits behind `path`, which follows `text`; the states are the last layer's outputs, [T, D].

        Without `normed` the target's last norm is left out.
        """
        seen: list[tuple[Array, Array]] = []
        state = np.zeros(states_TD.shape[1])
        for row, token in enumerate([*text[1:], *path]):
            if row < len(text) - 1:
                state = self._norm("model.norm", states_TD[row]) if normed else states_TD[row]
            embedded = self._tensors["model.embed_tokens.weight"][token]
            halves = [
                self._norm(self._layout.token_norm, embedded),
                self._norm(self._layout.hidden_norm, state),
            ]
            if self._layout.hidden_first:
                halves.reverse()
            x = self._tensors[f"{self._layout.product}.weight"] @ np.concatenate(halves)
            x = x + self._attended(self._own_norm("input_layernorm", x), row, seen)
            x = x + self._mlp(self._own_norm("post_attention_layernorm", x))
            state = self._norm(self._layout.last_norm, x)
        return self._tensors["lm_head.weight"] @ state

    def _norm(self, name: str, x: Array) -> Array:
        weight = self._tensors[f"{name}.weight"] + self._layout.offset
        return norm(x, weight, self._c["rms_norm_eps"])

    def _own_norm(self, name: str, x: Array) -> Array:
        return self._norm(f"{self._layout.layer}.{name}", x)

    def _product(self, name: str, x: Array) -> Array:
        bias = self._tensors.get(f"{self._layout.layer}.{name}.bias", 0.0)
        return self._tensors[f"{self._layout.layer}.{name}.weight"] @ x + bias

    def _attended(self, x: Array, row: int, seen: list[tuple[Array, Array]]) -> Array:
        query, gate = self._product("self_attn.q_proj", x), None
        if self._layout.gated:  # the query of a head, then its gate
            both = query.reshape(-1, 2, self._head)
            query, gate = both[:, 0], both[:, 1].reshape(-1)
        queries = self._heads("q", query, row)
        keys = self._heads("k", self._product("self_attn.k_proj", x), row)
        seen.append((keys, self._product("self_attn.v_proj", x).reshape(-1, self._head)))
        values = attended(queries, seen, self._head**-0.5)
        return self._product("self_attn.o_proj", values if gate is None else values * sigmoid(gate))

    def _heads(self, which: str, x: Array, row: int) -> Array:
        heads = x.reshape(-1, self._head)
        name = f"self_attn.{which}_norm"
        if f"{self._layout.layer}.{name}.weight" in self._tensors:
            heads = self._own_norm(name, heads)
        return rotated(heads, row, self._theta, self._rotated)

    def _mlp(self, x: Array) -> Array:
        if f"{self._layout.layer}.mlp.gate.weight" not in self._tensors:
            return self._gated("mlp", x)
        scores = softmax(self._product("mlp.gate", x))
        chosen = np.argsort(-scores, kind="stable")[: self._c["num_experts_per_tok"]]
        total = scores[chosen].sum() if self._c.get("norm_topk_prob", True) else 1.0
        found = sum(scores[i] / total * self._gated(f"mlp.experts.{i}", x) for i in chosen)
        shared = self._gated("mlp.shared_expert", x)
        return found + sigmoid(self._product("mlp.shared_expert_gate", x)) * shared

    def _gated(self, name: str, x: Array) -> Array:
        gate = silu(self._product(f"{name}.gate_proj", x))
        return self._product(f"{name}.down_proj", gate * self._product(f"{name}.up_proj", x))
