"""GPT-NeoX (Pythia) and StableLM: LayerNorms, partial rope, parallel attention and MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Activation, Family, ModelConfig, Norm
from specinfer.models.fields import Fields
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import BIASED, HfFamily, refuse, rotary_from_hf
from specinfer.models.sources import QKV, Names

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
_STABLELM: Final[Fields] = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
}
_KEYS: Final = replace(BIASED, norm_eps="layer_norm_eps")


def _neox(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_NEOX, **c}
    c = {"rope_theta": c["rotary_emb_base"], "partial_rotary_factor": c["rotary_pct"], **c}
    return replace(
        rotary_from_hf(Family.NEOX, c, ids, _KEYS),
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        mlp_bias=True,
        parallel_block=bool(c["use_parallel_residual"]),
    )


def _stablelm(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_STABLELM, **c}
    refuse(c, "qk_layernorm")
    parallel = bool(c.get("use_parallel_residual", False))
    return replace(
        rotary_from_hf(Family.STABLELM, c, ids, replace(_KEYS, qkv_bias="use_qkv_bias", o_bias="")),
        norm=Norm.LAYER,
        norm_bias=True,
        parallel_block=parallel,
        shared_norm=parallel,
    )


def _neox_from_gguf(head: GgufHead) -> ModelConfig:
    return replace(
        decoder_from_gguf(Family.NEOX, head, norm=Norm.LAYER),
        gated_mlp=False,
        activation=Activation.GELU,
        parallel_block=bool(head.fields.get("use_parallel_residual", True)),
    )


def _stablelm_from_gguf(head: GgufHead) -> ModelConfig:
    shared = "blk.0.ffn_norm.weight" not in head.shapes
    return replace(
        decoder_from_gguf(Family.STABLELM, head, norm=Norm.LAYER), parallel_block=shared, shared_norm=shared
    )


HF: Final = (
    HfFamily(
        ("gpt_neox",),
        _neox,
        Names(
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
        embeddings="gpt_neox.embed_in.weight",
    ),
    HfFamily(("stablelm",), _stablelm),
)
GGUF: Final = (
    GgufFamily("gptneox", _neox_from_gguf, {**INSIDE, "attn_qkv": QKV}),
    GgufFamily("stablelm", _stablelm_from_gguf),
)
