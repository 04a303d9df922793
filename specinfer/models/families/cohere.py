"""Models with rope of adjacent elements: Cohere's Command models, and GLM-4.

Cohere's have parallel attention and MLP after one LayerNorm. GLM-4 rotates half of each head, and has a fused
MLP and, from the 0414 models on, four norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.models.config import Family, ModelConfig, Norm, NormPlace
from specinfer.models.fields import Fields, count, positive
from specinfer.models.gguf_config import BOTH_SIDES, INSIDE, GgufFamily, GgufHead
from specinfer.models.gguf_config import windows as gguf_windows
from specinfer.models.hf_config import BIASED, ConfigKeys, HfFamily, but_every, defaults, window_of, windows
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
_SIDE_BY_SIDE: Final[Mapping[str, Any]] = {"norm": Norm.LAYER, "parallel_block": True, "shared_norm": True}
_GLM: Final = defaults(
    eps=1.5625e-07,
    context=131072,
    num_key_value_heads=2,
    head_dim=128,
    partial_rotary_factor=0.5,
    attention_bias=True,
)
_GLM_ENDS: Final = (151329, 151336, 151338)  # end-of-text ids if config.json has none
_GLM_KEYS: Final = ConfigKeys(qkv_bias="attention_bias")
_GLM_4: Final[Mapping[str, Any]] = {"norm_place": NormPlace.BOTH}
_FUSED: Final = {"mlp.gate_up_proj": GATE_UP}
_FUSED_GGUF: Final = {"attn_qkv": QKV, "ffn_up": GATE_UP}
_KEYS: Final = replace(BIASED, norm_eps="layer_norm_eps")


def _cohere(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, logit_scale=positive(c, "logit_scale"))


def _cohere_2(config: ModelConfig, c: Fields) -> ModelConfig:
    pattern = count(c, "sliding_window_pattern")
    return _windowed(_cohere(config, c), windows(c, window_of(c), but_every(pattern)))


def _windowed(config: ModelConfig, found: tuple[int | None, ...]) -> ModelConfig:
    """Set these windows; layers without a window have no rope either."""
    plain = frozenset(layer for layer, window in enumerate(found) if window is None)
    return replace(config, layer_windows=found, layers_without_rope=plain)


def _cohere_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    return _cohere(config, head.fields)


def _cohere_2_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    pattern = count(head.fields, "attention.sliding_window_pattern", 4)
    return _windowed(_cohere(config, head.fields), gguf_windows(config, head, but_every(pattern)))


def _glm(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, eos_ids=config.eos_ids or _GLM_ENDS)


_NEIGHBOURS: Final = Names(neighbours=True)
HF: Final = (
    HfFamily(("cohere",), Family.COHERE, _COHERE, _KEYS, _cohere, _SIDE_BY_SIDE, names=_NEIGHBOURS),
    HfFamily(("cohere2",), Family.COHERE2, _COHERE_2, _KEYS, _cohere_2, _SIDE_BY_SIDE, names=_NEIGHBOURS),
    HfFamily(("glm",), Family.GLM, _GLM, _GLM_KEYS, _glm, names=Names(inside=_FUSED, neighbours=True)),
    HfFamily(
        ("glm4",),
        Family.GLM4,
        _GLM,
        _GLM_KEYS,
        _glm,
        _GLM_4,
        names=Names(
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
    GgufFamily("command-r", Family.COHERE, _cohere_from_gguf, _SIDE_BY_SIDE, neighbours=True),
    GgufFamily("cohere2", Family.COHERE2, _cohere_2_from_gguf, _SIDE_BY_SIDE, neighbours=True),
    GgufFamily("chatglm", Family.GLM, inside={**INSIDE, **_FUSED_GGUF}, neighbours=True),
    GgufFamily("glm4", Family.GLM4, fixed=_GLM_4, inside={**BOTH_SIDES, **_FUSED_GGUF}, neighbours=True),
)
