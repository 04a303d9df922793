"""Phi-3 and Phi-4: Llama with fused projections, and LongRoPE in models with a long context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig
from specinfer.models.fields import Fields, integer
from specinfer.models.gguf_config import INSIDE, GgufFamily, decoder_from_gguf
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim, window_of
from specinfer.models.positions import rope_from_hf
from specinfer.models.sources import GATE_UP, QKV, Names

_DEFAULTS: Final[Fields] = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_OLD_NAMES: Final = ("su", "yarn")  # earlier names of longrope


def _phi3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = _with_new_names({**_DEFAULTS, **c})
    shared = decoder_from_hf(Family.PHI3, c, ids, rope=rope_from_hf(c, head_dim(c)))
    window = window_of(c)
    if window is not None and window >= integer(c, "max_position_embeddings"):
        window = None  # Phi-4-mini's exceeds its context
    return replace(shared, layer_windows=(window,) * shared.num_layers)


def _with_new_names(c: Fields) -> Fields:
    """Replace the earlier names of longrope."""
    key = "rope_scaling" if c.get("rope_parameters") is None else "rope_parameters"
    rope = c.get(key)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in _OLD_NAMES:
        return c
    return {**c, key: {**rope, "rope_type": "longrope"}}


HF: Final = (
    HfFamily(
        ("phi3",),
        _phi3,
        Names(inside={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}),
    ),
)
GGUF: Final = (
    GgufFamily(
        "phi3",
        lambda head: decoder_from_gguf(Family.PHI3, head),
        {**INSIDE, "attn_qkv": QKV, "ffn_up": GATE_UP},
    ),
)
