"""Models with LayerNorms, biases and a plain MLP, most with learned positions.

GPT-2, GPTBigCode (StarCoder, with one key-value head for all query heads), StarCoder 2 with rope, and OPT.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Norm
from specinfer.models.fields import Fields, count, integer
from specinfer.models.gguf_config import STACKED, GgufFamily
from specinfer.models.hf_config import ConfigKeys, HfFamily, no_rope, not_computed, window_of
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
    "enable_bias": True,
}
_OPT_KEYS: Final = ConfigKeys(
    inner="ffn_dim",
    norm_eps="layer_norm_eps",
    activation="activation_function",
    qkv_bias="enable_bias",
    o_bias="enable_bias",
    mlp_bias="enable_bias",
)
_STARCODER_2_KEYS: Final = ConfigKeys(
    norm_eps="norm_epsilon", qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"
)
_PLAIN: Final[Mapping[str, Any]] = {"norm": Norm.LAYER, "gated_mlp": False}
_PLAIN_LEARNED: Final[Mapping[str, Any]] = {**_PLAIN, "learned_positions": True}
_BIASED: Final = {"norm_bias": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
_GELU: Final = {"activation": Activation.GELU_TANH}


def _gpt_2_given(c: Fields) -> Fields:
    """Add the sizes that files omit."""
    inner = 4 * count(c, "n_embd") if c.get("n_inner") is None else c["n_inner"]
    return {**c, "n_inner": inner, "num_key_value_heads": count(c, "n_head")}


def _bigcode_given(c: Fields) -> Fields:
    return {**_gpt_2_given(c), **({"num_key_value_heads": 1} if c["multi_query"] else {})}


def _gpt(config: ModelConfig, c: Fields) -> ModelConfig:
    return config if c["scale_attn_weights"] else replace(config, attention_scale=1.0)


def _starcoder_2(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, layer_windows=(window_of(c),) * config.num_layers)


def _opt_given(c: Fields) -> Fields:
    """Refuse OPT-350m, which alone has norms of sums and narrower embeddings."""
    for key, known in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        if c.get(key, known) != known:
            raise not_computed(key, c[key], Family.OPT.value)
    if not c.get("layer_norm_elementwise_affine", True):
        raise ModelError("config.json sets layer_norm_elementwise_affine = false, which is not supported")
    hidden, heads = count(c, "hidden_size"), count(c, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if (width := integer(c, "word_embed_proj_dim", hidden)) != hidden:
        raise not_computed("word_embed_proj_dim", width, Family.OPT.value)
    return c


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
_OPT_NAMES: Final = Names(
    layers="model.decoder.layers.",
    outside={
        "model.decoder.embed_tokens": "model.embed_tokens",
        "model.decoder.embed_positions": "model.embed_positions",
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
    HfFamily(
        Family.GPT2,
        _GPT_2,
        _GPT_KEYS,
        _gpt,
        {**_PLAIN_LEARNED, **_BIASED},
        given=_gpt_2_given,
        ropes=no_rope,
        names=Names("transformer.h.", _OUTSIDE, _INSIDE, transposed=_MATRICES),
    ),
    HfFamily(
        Family.STARCODER,
        _BIGCODE,
        _GPT_KEYS,
        _gpt,
        {**_PLAIN_LEARNED, **_BIASED},
        given=_bigcode_given,
        ropes=no_rope,
        names=Names("transformer.h.", _OUTSIDE, _INSIDE, by_key_head=True),
    ),
    HfFamily(
        Family.STARCODER2,
        _STARCODER_2,
        _STARCODER_2_KEYS,
        _starcoder_2,
        {**_PLAIN, "norm_bias": True},
        names=Names(inside={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    ),
    HfFamily(
        Family.OPT,
        _OPT,
        _OPT_KEYS,
        fixed={**_PLAIN_LEARNED, "norm_bias": True, "position_offset": 2},  # fairseq reserved two for padding
        given=_opt_given,
        ropes=no_rope,
        names=_OPT_NAMES,
    ),
)
_LEARNED_GELU: Final = {**_PLAIN_LEARNED, **_GELU}
GGUF: Final = (
    GgufFamily("gpt2", Family.GPT2, fixed=_LEARNED_GELU, inside=STACKED, rope=False),
    GgufFamily("starcoder", Family.STARCODER, fixed=_LEARNED_GELU, inside=STACKED, rope=False),
    GgufFamily("starcoder2", Family.STARCODER2, fixed={**_PLAIN, **_GELU}),
)
