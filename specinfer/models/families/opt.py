"""OPT: learned positions, LayerNorm and a plain MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Family, ModelConfig, Norm, NormPlace
from specinfer.models.fields import Fields, count, integer
from specinfer.models.hf_config import ConfigKeys, HfFamily, decoder_from_hf
from specinfer.models.sources import Names

_DEFAULTS: Final[Fields] = {
    "layer_norm_eps": 1e-5,  # torch.nn.LayerNorm's default; OPT's config has no field for it
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_KEYS: Final = ConfigKeys(inner="ffn_dim", norm_eps="layer_norm_eps", activation="activation_function")


def _opt(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, **c}
    if not c.get("layer_norm_elementwise_affine", True):
        raise ModelError("config.json sets layer_norm_elementwise_affine = false, which is not supported")
    hidden, heads = count(c, "hidden_size"), count(c, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    bias = bool(c.get("enable_bias", True))
    norm_first = bool(c.get("do_layer_norm_before", True))
    return replace(
        decoder_from_hf(Family.OPT, c, ids, rope=None, keys=_KEYS),
        embedding_size=integer(c, "word_embed_proj_dim", hidden),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        learned_positions=True,
        position_offset=2,  # fairseq reserved two rows for padding
        norm=Norm.LAYER,
        norm_bias=True,
        norm_place=NormPlace.BEFORE if norm_first else NormPlace.AFTER_SUM,
        gated_mlp=False,
        final_norm=norm_first and not c.get("_remove_final_layer_norm", False),
    )


_NAMES: Final = Names(
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
HF: Final = (HfFamily(("opt",), _opt, _NAMES, "model.decoder.embed_tokens.weight"),)
