"""Models with rope of adjacent elements: Cohere's Command models, and GLM-4.

Cohere's have parallel attention and MLP after one LayerNorm. GLM-4 rotates half of each head, and has a fused
MLP and, from the 0414 models on, four norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, Norm, NormPlace
from specinfer.models.fields import Fields, count, positive
from specinfer.models.gguf_config import BOTH_SIDES, INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import (
    BIASED,
    ConfigKeys,
    HfFamily,
    defaults,
    refuse,
    rotary_from_hf,
    window_of,
    windows,
)
from specinfer.models.sources import GATE_UP, QKV, Names

_COHERE: Final[Fields] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
_COHERE_2: Final[Fields] = {
    **_COHERE,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_GLM: Final = defaults(
    eps=1.5625e-07,
    context=131072,
    num_key_value_heads=2,
    head_dim=128,
    partial_rotary_factor=0.5,
    attention_bias=True,
)
_GLM_ENDS: Final = (151329, 151336, 151338)  # end-of-text ids if config.json has none
_FUSED: Final = {"mlp.gate_up_proj": GATE_UP}
_FUSED_GGUF: Final = {"attn_qkv": QKV, "ffn_up": GATE_UP}
_KEYS: Final = replace(BIASED, norm_eps="layer_norm_eps")


def _cohere(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_COHERE, **c}
    refuse(c, "use_qk_norm")
    return _side_by_side(rotary_from_hf(Family.COHERE, c, ids, _KEYS), positive(c, "logit_scale"))


def _cohere_2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_COHERE_2, **c}
    pattern = count(c, "sliding_window_pattern")
    found = windows(c, window_of(c), lambda layer: (layer + 1) % pattern != 0)
    shared = rotary_from_hf(Family.COHERE2, c, ids, _KEYS)
    return _windowed(_side_by_side(shared, positive(c, "logit_scale")), found)


def _side_by_side(shared: ModelConfig, logit_scale: float) -> ModelConfig:
    return replace(shared, norm=Norm.LAYER, parallel_block=True, shared_norm=True, logit_scale=logit_scale)


def _windowed(shared: ModelConfig, found: tuple[int | None, ...]) -> ModelConfig:
    """Set these windows; layers without a window have no rope either."""
    plain = frozenset(layer for layer, window in enumerate(found) if window is None)
    return replace(shared, layer_windows=found, layers_without_rope=plain)


def _from_gguf(family: Family, head: GgufHead) -> ModelConfig:
    shared = decoder_from_gguf(family, head, norm=Norm.LAYER)
    return _side_by_side(shared, positive(head.fields, "logit_scale"))


def _cohere_2_from_gguf(head: GgufHead) -> ModelConfig:
    shared, window = _from_gguf(Family.COHERE2, head), gguf_window(head.fields)
    pattern = count(head.fields, "attention.sliding_window_pattern", 4)
    return _windowed(
        shared,
        tuple(window if (layer + 1) % pattern else None for layer in range(shared.num_layers)),
    )


def _glm(family: Family, c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    shared = rotary_from_hf(family, {**_GLM, **c}, ids, ConfigKeys(qkv_bias="attention_bias"))
    return replace(shared, eos_ids=shared.eos_ids or _GLM_ENDS)


def _glm4(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    return replace(_glm(Family.GLM4, c, ids), norm_place=NormPlace.BOTH)


def _glm4_from_gguf(head: GgufHead) -> ModelConfig:
    return replace(decoder_from_gguf(Family.GLM4, head), norm_place=NormPlace.BOTH)


HF: Final = (
    HfFamily(("cohere",), _cohere, Names(neighbours=True)),
    HfFamily(("cohere2",), _cohere_2, Names(neighbours=True)),
    HfFamily(("glm",), lambda c, ids: _glm(Family.GLM, c, ids), Names(inside=_FUSED, neighbours=True)),
    HfFamily(
        ("glm4",),
        _glm4,
        Names(
            inside={
                **_FUSED,
                "post_self_attn_layernorm": "post_attention_layernorm",
                "post_attention_layernorm": "pre_feedforward_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            },
            neighbours=True,
        ),
    ),
)
GGUF: Final = (
    GgufFamily("command-r", lambda head: _from_gguf(Family.COHERE, head), INSIDE, neighbours=True),
    GgufFamily("cohere2", _cohere_2_from_gguf, INSIDE, neighbours=True),
    GgufFamily(
        "chatglm",
        lambda head: decoder_from_gguf(Family.GLM, head),
        {**INSIDE, **_FUSED_GGUF},
        neighbours=True,
    ),
    GgufFamily("glm4", _glm4_from_gguf, {**BOTH_SIDES, **_FUSED_GGUF}, neighbours=True),
)
