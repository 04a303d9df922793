"""Models with LayerNorms, biases and a plain MLP, most with learned positions.

GPT-2, GPTBigCode (StarCoder, with one key-value head for all query heads), StarCoder 2 with rope, and OPT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Norm, NormPlace
from specinfer.models.fields import Fields, count, integer
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import (
    ConfigKeys,
    HfFamily,
    decoder_from_hf,
    refuse,
    rotary_from_hf,
    window_of,
)
from specinfer.models.sources import QKV, Inside, Names

_GPT_2: Final[Fields] = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
}
_BIGCODE: Final[Fields] = {**_GPT_2, "activation_function": "gelu_pytorch_tanh", "multi_query": True}
_STARCODER_2: Final[Fields] = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_bias": True,
}
_GPT_KEYS: Final = ConfigKeys(
    hidden="n_embd",
    inner="n_inner",
    layers="n_layer",
    heads="n_head",
    norm_eps="layer_norm_epsilon",
    context="n_positions",
    activation="activation_function",
)
_OPT: Final[Fields] = {
    "layer_norm_eps": 1e-5,  # torch.nn.LayerNorm's default; OPT's config has no field for it
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_OPT_KEYS: Final = ConfigKeys(inner="ffn_dim", norm_eps="layer_norm_eps", activation="activation_function")


def _gpt_2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GPT_2, **c}
    refuse(c, "scale_attn_by_inverse_layer_idx")
    return _learned(Family.GPT2, c, ids, kv_heads=count(c, "n_head"))


def _bigcode(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_BIGCODE, **c}
    return _learned(Family.STARCODER, c, ids, kv_heads=1 if c["multi_query"] else count(c, "n_head"))


def _learned(family: Family, c: Fields, ids: Sequence[Fields], *, kv_heads: int) -> ModelConfig:
    """A model with a table of positions."""
    refuse(c, "add_cross_attention")
    if c.get("n_inner") is None:
        c = {**c, "n_inner": 4 * count(c, "n_embd")}
    shared = decoder_from_hf(family, {**c, "num_key_value_heads": kv_heads}, ids, _GPT_KEYS, rope=None)
    scale = shared.attention_scale if c["scale_attn_weights"] else 1.0
    return _biased(replace(shared, learned_positions=True, attention_scale=scale))


def _starcoder_2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_STARCODER_2, **c}
    keys = ConfigKeys(norm_eps="norm_epsilon")
    shared = rotary_from_hf(Family.STARCODER2, c, ids, keys)
    windowed = replace(shared, layer_windows=(window_of(c),) * shared.num_layers)
    return _biased(windowed, bias=bool(c["use_bias"]))


def _biased(shared: ModelConfig, *, bias: bool = True) -> ModelConfig:
    """Add LayerNorms with a bias, and an MLP without a gate."""
    return replace(
        shared,
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _starcoder_2_from_gguf(head: GgufHead) -> ModelConfig:
    shared = decoder_from_gguf(Family.STARCODER2, head, norm=Norm.LAYER)
    return replace(shared, gated_mlp=False, activation=Activation.GELU_TANH)


def _learned_from_gguf(family: Family, head: GgufHead) -> ModelConfig:
    shared = decoder_from_gguf(family, head, norm=Norm.LAYER, rope=False)
    return replace(shared, learned_positions=True, gated_mlp=False, activation=Activation.GELU_TANH)


def _opt(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_OPT, **c}
    if not c.get("layer_norm_elementwise_affine", True):
        raise ModelError("config.json sets layer_norm_elementwise_affine = false, which is not supported")
    hidden, heads = count(c, "hidden_size"), count(c, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    norm_first = bool(c.get("do_layer_norm_before", True))
    shared = decoder_from_hf(Family.OPT, c, ids, _OPT_KEYS, rope=None)
    return replace(
        _biased(shared, bias=bool(c.get("enable_bias", True))),
        embedding_size=integer(c, "word_embed_proj_dim", hidden),
        learned_positions=True,
        position_offset=2,  # fairseq reserved two rows for padding
        norm_place=NormPlace.BEFORE if norm_first else NormPlace.AFTER_SUM,
        final_norm=norm_first and not c.get("_remove_final_layer_norm", False),
    )


_OUTSIDE: Final = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.ln_f": "model.norm",
}
_INSIDE: Final[Inside] = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": QKV,
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_MATRICES: Final = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_TABLE: Final = "transformer.wte.weight"
_OPT_NAMES: Final = Names(
    layers="model.decoder.layers.",
    outside={
        "model.decoder.embed_tokens": "model.embed_tokens",
        "model.decoder.embed_positions": "model.embed_positions",
        "model.decoder.project_in": "model.project_in",
        "model.decoder.project_out": "model.project_out",
        "model.decoder.final_layer_norm": "model.norm",
    },
    inside={
        "self_attn_layer_norm": "input_layernorm",
        "self_attn.out_proj": "self_attn.o_proj",
        "final_layer_norm": "post_attention_layernorm",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    },
)
HF: Final = (
    HfFamily(("gpt2",), _gpt_2, Names("transformer.h.", _OUTSIDE, _INSIDE, transposed=_MATRICES), _TABLE),
    HfFamily(
        ("gpt_bigcode",), _bigcode, Names("transformer.h.", _OUTSIDE, _INSIDE, by_key_head=True), _TABLE
    ),
    HfFamily(
        ("starcoder2",),
        _starcoder_2,
        Names(inside={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    ),
    HfFamily(("opt",), _opt, _OPT_NAMES, "model.decoder.embed_tokens.weight"),
)
_STACKED: Final[Inside] = {**INSIDE, "attn_qkv": QKV}
GGUF: Final = (
    GgufFamily("gpt2", lambda head: _learned_from_gguf(Family.GPT2, head), _STACKED),
    GgufFamily("starcoder", lambda head: _learned_from_gguf(Family.STARCODER, head), _STACKED),
    GgufFamily("starcoder2", _starcoder_2_from_gguf),
)
