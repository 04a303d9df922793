"""Falcon and MPT: one stack of queries, keys and values, LayerNorms, and in some models ALiBi.

Falcon has parallel attention and MLP, and few key-value heads; its first 1B and 7B RW models use ALiBi. Two
switches select one of three layouts: one key-value head for all query heads, one for each query head, and
since the 40B model (`new_decoder_architecture`) a given number of them.

MPT has ALiBi, LayerNorms without a bias, and optional clipping of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Norm
from specinfer.models.fields import Fields, count, mapping, optional_positive, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import ConfigKeys, HfFamily, decoder_from_hf, head_dim
from specinfer.models.positions import Alibi, rope_from_hf
from specinfer.models.sources import QKV, Names

_FALCON: Final[Fields] = {
    "layer_norm_epsilon": 1e-5,
    "activation": "gelu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "multi_query": True,
    "parallel_attn": True,
}
_FALCON_OLD_WORDS: Final = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_layer": "num_hidden_layers",
}
_FALCON_KEYS: Final = ConfigKeys(
    inner="ffn_hidden_size",
    kv_heads="num_kv_heads",
    norm_eps="layer_norm_epsilon",
    activation="activation",
    qkv_bias="bias",
    o_bias="bias",
    mlp_bias="bias",
)
_MPT: Final[Fields] = {
    "layer_norm_epsilon": 1e-5,
    "max_seq_len": 2048,
    "tie_word_embeddings": True,
    "activation": "gelu",  # no key holds it
    "attn_config": {},
}
# The only values that transformers' own class computes; it ignores others.
_MPT_ONLY: Final[Fields] = {
    "expansion_ratio": 4,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "logit_scale": None,
}
_MPT_ONLY_IN_ATTENTION: Final[Fields] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "prefix_lm": False,
    "attn_uses_sequence_id": False,
}
_MPT_KEYS: Final = ConfigKeys(
    hidden="d_model",
    inner="inner",
    layers="n_layers",
    heads="n_heads",
    norm_eps="layer_norm_epsilon",
    context="max_seq_len",
    activation="activation",
)


def _falcon(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_FALCON, **c}
    c = {**{new: c[old] for old, new in _FALCON_OLD_WORDS.items() if old in c}, **c}
    hidden, heads = count(c, "hidden_size"), count(c, "num_attention_heads")
    new = bool(c.get("new_decoder_architecture", c.get("model_type") == "RefinedWeb"))
    parallel = bool(c["parallel_attn"])
    if not new:
        c = {**c, "num_kv_heads": 1 if c["multi_query"] else heads}
    if c.get("ffn_hidden_size") is None:
        c = {**c, "ffn_hidden_size": 4 * hidden}
    norms = count(c, "num_ln_in_parallel_attn", 2 if new else 1)
    if norms > 2 or (norms == 2 and not new) or (new and not parallel):
        raise ModelError(
            f"config.json has new_decoder_architecture = {new}, parallel_attn = {parallel} and "
            f"num_ln_in_parallel_attn = {norms}; supported: the combinations of published Falcons"
        )
    alibi = Alibi.of(heads, rounded=True) if c.get("alibi", False) else None
    rope = None if alibi is not None else rope_from_hf(c, head_dim(c))
    return replace(
        decoder_from_hf(Family.FALCON, c, ids, _FALCON_KEYS, rope=rope),
        alibi=alibi,
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        parallel_block=parallel,
        shared_norm=parallel and norms == 1,
    )


def _falcon_from_gguf(head: GgufHead) -> ModelConfig:
    return replace(
        decoder_from_gguf(Family.FALCON, head, norm=Norm.LAYER),
        gated_mlp=False,
        activation=Activation.GELU,
        parallel_block=True,
        shared_norm="blk.0.attn_norm_2.weight" not in head.shapes,
    )


def _gguf_inside(head: GgufHead) -> dict[str, str | tuple[str, ...]]:
    """If there are two norms, attn_norm is the MLP's."""
    two = "blk.0.attn_norm_2.weight" in head.shapes
    return {
        **INSIDE,
        "attn_qkv": QKV,
        "attn_norm": "post_attention_layernorm" if two else "input_layernorm",
        "attn_norm_2": "input_layernorm",
    }


def _mpt(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_MPT, **c}
    attention = mapping(c, "attn_config")
    for fields, only in ((c, _MPT_ONLY), (attention, _MPT_ONLY_IN_ATTENTION)):
        for key, value in only.items():
            if fields.get(key, value) != value:
                raise ModelError(f"config.json sets {key} = {fields[key]!r}; supported for MPT: {value!r}")
    c = {**c, "inner": 4 * count(c, "d_model")}
    shared = decoder_from_hf(Family.MPT, c, ids, _MPT_KEYS, rope=None)
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
        ("falcon", "RefinedWeb", "RefinedWebModel"),
        _falcon,
        Names(
            "transformer.h.",
            {"transformer.word_embeddings": "model.embed_tokens", "transformer.ln_f": "model.norm"},
            {
                "ln_attn": "input_layernorm",
                "ln_mlp": "post_attention_layernorm",
                "self_attention.query_key_value": QKV,
                "self_attention.dense": "self_attn.o_proj",
                "mlp.dense_h_to_4h": "mlp.up_proj",
                "mlp.dense_4h_to_h": "mlp.down_proj",
            },
            by_key_head=True,
        ),
        embeddings="transformer.word_embeddings.weight",
    ),
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
GGUF: Final = (
    GgufFamily("falcon", _falcon_from_gguf, _gguf_inside),
    GgufFamily("mpt", _mpt_from_gguf, {**INSIDE, "attn_qkv": QKV}),
)
