"""Falcon, MPT, GPT-NeoX, StableLM and Cohere's Command: LayerNorms, most with parallel blocks or ALiBi.

Falcon has parallel attention and MLP, and few key-value heads; its first 1B and 7B RW models use ALiBi. Two
switches select one of three layouts: one key-value head for all query heads, one for each query head, and
since the 40B model (`new_decoder_architecture`) a given number of them.

MPT has ALiBi, LayerNorms without a bias, and optional clipping of queries, keys and values. GPT-NeoX (Pythia)
and StableLM have partial rope. Command models have one norm for both blocks, and rope of adjacent elements.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Norm
from specinfer.models.fields import Fields, count, mapping, optional_positive, positive
from specinfer.models.gguf_config import STACKED, GgufFamily, GgufHead
from specinfer.models.gguf_config import windows as gguf_windows
from specinfer.models.hf_config import (
    BIASED,
    ConfigKeys,
    HfFamily,
    but_every,
    no_rope,
    one_rope,
    window_of,
    windows,
)
from specinfer.models.positions import Alibi, Rope
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


_NEOX: Final[Fields] = {
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000.0,
}
_EPS_KEYS: Final = replace(BIASED, norm_eps="layer_norm_eps")
_STABLELM: Final[Fields] = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
}
_LAYER: Final[Mapping[str, Any]] = {"norm": Norm.LAYER}
_UNGATED: Final[Mapping[str, Any]] = {**_LAYER, "gated_mlp": False}
_UNGATED_GELU: Final[Mapping[str, Any]] = {**_UNGATED, "activation": Activation.GELU}
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


def _falcon_given(c: Fields) -> Fields:
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
    return {**c, "num_ln_in_parallel_attn": norms}


def _falcon_ropes(c: Fields) -> tuple[Rope | None, Rope | None]:
    return no_rope(c) if c.get("alibi", False) else one_rope(c)


def _falcon(config: ModelConfig, c: Fields) -> ModelConfig:
    parallel = bool(c["parallel_attn"])
    return replace(
        config,
        alibi=Alibi.of(config.num_heads, rounded=True) if config.rope is None else None,
        parallel_block=parallel,
        shared_norm=parallel and c["num_ln_in_parallel_attn"] == 1,
    )


def _falcon_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    shared = "blk.0.attn_norm_2.weight" not in head.shapes
    return replace(config, parallel_block=True, shared_norm=shared)


def _gguf_inside(head: GgufHead) -> dict[str, str | tuple[str, ...]]:
    """If there are two norms, attn_norm is the MLP's."""
    two = "blk.0.attn_norm_2.weight" in head.shapes
    return {
        **STACKED,
        "attn_norm": "post_attention_layernorm" if two else "input_layernorm",
        "attn_norm_2": "input_layernorm",
    }


def _mpt_given(c: Fields) -> Fields:
    for fields, only in ((c, _MPT_ONLY), (mapping(c, "attn_config"), _MPT_ONLY_IN_ATTENTION)):
        for key, value in only.items():
            if fields.get(key, value) != value:
                raise ModelError(f"config.json sets {key} = {fields[key]!r}; supported for MPT: {value!r}")
    return {**c, "inner": 4 * count(c, "d_model")}


def _mpt(config: ModelConfig, c: Fields) -> ModelConfig:
    attention = mapping(c, "attn_config")
    return replace(
        config,
        alibi=Alibi.of(config.num_heads),
        qkv_clip=optional_positive(attention, "clip_qkv"),
        attention_scale=positive(attention, "softmax_scale", config.attention_scale),
    )


def _mpt_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    steepest = positive(head.fields, "attention.max_alibi_bias")
    return replace(config, alibi=Alibi.of(config.num_heads, steepest=steepest))


def _neox(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, parallel_block=bool(c["use_parallel_residual"]))


def _neox_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    return replace(config, parallel_block=bool(head.fields.get("use_parallel_residual", True)))


def _stablelm(config: ModelConfig, c: Fields) -> ModelConfig:
    parallel = bool(c.get("use_parallel_residual", False))
    return replace(config, parallel_block=parallel, shared_norm=parallel)


def _stablelm_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    parallel = "blk.0.ffn_norm.weight" not in head.shapes
    return replace(config, parallel_block=parallel, shared_norm=parallel)


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


_NEIGHBOURS: Final = Names(neighbours=True)
HF: Final = (
    HfFamily(
        Family.FALCON,
        _FALCON,
        _FALCON_KEYS,
        _falcon,
        {**_UNGATED, "norm_bias": True},
        given=_falcon_given,
        ropes=_falcon_ropes,
        names=Names(
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
        also=("RefinedWeb", "RefinedWebModel"),
    ),
    HfFamily(
        Family.MPT,
        _MPT,
        _MPT_KEYS,
        _mpt,
        _UNGATED,
        given=_mpt_given,
        ropes=no_rope,
        names=Names(
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
    ),
    HfFamily(
        Family.NEOX,
        _NEOX,
        _EPS_KEYS,
        _neox,
        {**_UNGATED, "norm_bias": True, "mlp_bias": True},
        given=lambda c: {
            "rope_theta": c["rotary_emb_base"],
            "partial_rotary_factor": c["rotary_pct"],
            **c,
        },
        names=Names(
            "gpt_neox.layers.",
            {
                "gpt_neox.embed_in": "model.embed_tokens",
                "gpt_neox.final_layer_norm": "model.norm",
                "embed_out": "lm_head",
            },
            {
                "attention.query_key_value": QKV,
                "attention.dense": "self_attn.o_proj",
                "mlp.dense_h_to_4h": "mlp.up_proj",
                "mlp.dense_4h_to_h": "mlp.down_proj",
            },
            by_key_head=True,
        ),
    ),
    HfFamily(
        Family.STABLELM,
        _STABLELM,
        replace(_EPS_KEYS, qkv_bias="use_qkv_bias", o_bias=""),
        _stablelm,
        {**_LAYER, "norm_bias": True},
    ),
    HfFamily(Family.COHERE, _COHERE, _EPS_KEYS, _cohere, _SIDE_BY_SIDE, names=_NEIGHBOURS),
    HfFamily(Family.COHERE2, _COHERE_2, _EPS_KEYS, _cohere_2, _SIDE_BY_SIDE, names=_NEIGHBOURS),
)
GGUF: Final = (
    GgufFamily("falcon", Family.FALCON, _falcon_from_gguf, _UNGATED_GELU, _gguf_inside),
    GgufFamily("mpt", Family.MPT, _mpt_from_gguf, _UNGATED_GELU, STACKED, rope=False),
    GgufFamily("gptneox", Family.NEOX, _neox_from_gguf, _UNGATED_GELU, STACKED),
    GgufFamily("stablelm", Family.STABLELM, _stablelm_from_gguf, _LAYER),
    GgufFamily("command-r", Family.COHERE, _cohere_from_gguf, _SIDE_BY_SIDE, neighbours=True),
    GgufFamily("cohere2", Family.COHERE2, _cohere_2_from_gguf, _SIDE_BY_SIDE, neighbours=True),
)
