"""GLM-4: rope of adjacent elements in half of each head, a fused MLP, four norms from the 0414 models on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, NormPlace
from specinfer.models.fields import Fields
from specinfer.models.gguf_config import BOTH_SIDES, INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim
from specinfer.models.positions import rope_from_hf
from specinfer.models.sources import GATE_UP, QKV, Names

_DEFAULTS: Final[Fields] = {
    "rms_norm_eps": 1.5625e-07,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_ENDS: Final = (151329, 151336, 151338)  # end-of-text ids if config.json has none
_FUSED: Final = {"mlp.gate_up_proj": GATE_UP}


def _shared(family: Family, c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, **c}
    shared = decoder_from_hf(family, c, ids, rope=rope_from_hf(c, head_dim(c)))
    return replace(shared, qkv_bias=bool(c["attention_bias"]), eos_ids=shared.eos_ids or _ENDS)


def _glm4(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    return replace(_shared(Family.GLM4, c, ids), norm_place=NormPlace.BOTH)


def _glm4_from_gguf(head: GgufHead) -> ModelConfig:
    return replace(decoder_from_gguf(Family.GLM4, head), norm_place=NormPlace.BOTH)


HF: Final = (
    HfFamily(("glm",), lambda c, ids: _shared(Family.GLM, c, ids), Names(inside=_FUSED, neighbours=True)),
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
_FUSED_GGUF: Final = {"attn_qkv": QKV, "ffn_up": GATE_UP}
GGUF: Final = (
    GgufFamily(
        "chatglm",
        lambda head: decoder_from_gguf(Family.GLM, head),
        {**INSIDE, **_FUSED_GGUF},
        neighbours=True,
    ),
    GgufFamily(
        "glm4",
        _glm4_from_gguf,
        {**BOTH_SIDES, **_FUSED_GGUF},
        neighbours=True,
    ),
)
