"""MPT: ALiBi, LayerNorms without a bias, and optional clipping of queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Norm
from specinfer.models.fields import Fields, count, mapping, optional_positive, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import ConfigKeys, HfFamily, decoder_from_hf
from specinfer.models.positions import Alibi
from specinfer.models.sources import QKV, Names

_DEFAULTS: Final[Fields] = {
    "layer_norm_epsilon": 1e-5,
    "max_seq_len": 2048,
    "tie_word_embeddings": True,
    "activation": "gelu",  # no key holds it
    "attn_config": {},
}
# The only values that transformers' own class computes; it ignores others.
_ONLY: Final[Fields] = {
    "expansion_ratio": 4,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "logit_scale": None,
}
_ONLY_IN_ATTENTION: Final[Fields] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "prefix_lm": False,
    "attn_uses_sequence_id": False,
}
_KEYS: Final = ConfigKeys(
    hidden="d_model",
    inner="inner",
    layers="n_layers",
    heads="n_heads",
    norm_eps="layer_norm_epsilon",
    context="max_seq_len",
    activation="activation",
)


def _mpt(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, **c}
    attention = mapping(c, "attn_config")
    for fields, only in ((c, _ONLY), (attention, _ONLY_IN_ATTENTION)):
        for key, value in only.items():
            if fields.get(key, value) != value:
                raise ModelError(f"config.json sets {key} = {fields[key]!r}; supported for MPT: {value!r}")
    c = {**c, "inner": 4 * count(c, "d_model")}
    shared = decoder_from_hf(Family.MPT, c, ids, rope=None, keys=_KEYS)
    return replace(
        shared,
        alibi=Alibi.of(count(c, "n_heads")),
        norm=Norm.LAYER,
        gated_mlp=False,
        qkv_clip=optional_positive(attention, "clip_qkv"),
        attention_scale=positive(attention, "softmax_scale", shared.attention_scale),
    )


def _mpt_from_gguf(head: GgufHead) -> ModelConfig:
    shared = decoder_from_gguf(Family.MPT, head, norm=Norm.LAYER, rope=False)
    return replace(
        shared,
        alibi=Alibi.of(shared.num_heads, steepest=positive(head.fields, "attention.max_alibi_bias")),
        gated_mlp=False,
        activation=Activation.GELU,
    )


HF: Final = (
    HfFamily(
        ("mpt",),
        _mpt,
        Names(
            "transformer.blocks.",
            {"transformer.wte": "model.embed_tokens", "transformer.norm_f": "model.norm"},
            {
                "norm_1": "input_layernorm",
                "norm_2": "post_attention_layernorm",
                "attn.Wqkv": QKV,
                "attn.out_proj": "self_attn.o_proj",
                "ffn.up_proj": "mlp.up_proj",
                "ffn.down_proj": "mlp.down_proj",
            },
        ),
        embeddings="transformer.wte.weight",
    ),
)
GGUF: Final = (GgufFamily("mpt", _mpt_from_gguf, {**INSIDE, "attn_qkv": QKV}),)
