"""Granite: Llama with factors for embeddings, scores, residual sums and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig
from specinfer.models.fields import Fields, positive
from specinfer.models.gguf_config import GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim
from specinfer.models.positions import rope_from_hf

_DEFAULTS: Final[Fields] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def _granite(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, **c}
    bias = bool(c.get("attention_bias", False))
    return replace(
        decoder_from_hf(Family.GRANITE, c, ids, rope=rope_from_hf(c, head_dim(c))),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
        embedding_scale=positive(c, "embedding_multiplier", 1.0),
        attention_scale=positive(c, "attention_multiplier", 1.0),
        residual_scale=positive(c, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive(c, "logits_scaling", 1.0),
    )


def _granite_from_gguf(head: GgufHead) -> ModelConfig:
    divided = positive(head.fields, "logit_scale", 1.0)
    return replace(decoder_from_gguf(Family.GRANITE, head), logit_scale=1.0 / divided)


HF: Final = (HfFamily(("granite",), _granite),)
GGUF: Final = (GgufFamily("granite", _granite_from_gguf, neighbours=True),)
