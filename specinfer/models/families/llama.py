"""Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rope and a gated MLP, with other biases, windows and norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, QkNorm
from specinfer.models.fields import Fields, integer
from specinfer.models.gguf_config import GgufFamily, decoder_from_gguf
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim, refuse, window_of, windows
from specinfer.models.rope_config import rope_from_hf

# What transformers fills in when config.json leaves it out.
_DEFAULTS: Final[Fields] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN: Final[Fields] = {**_DEFAULTS, "max_position_embeddings": 32768, "max_window_layers": 28}


def _shared(family: Family, c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    refuse(c, "attn_logit_softcapping", "use_bidirectional_attention")
    return decoder_from_hf(family, c, ids, rope=rope_from_hf(c, head_dim(c)))


def _llama(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, "max_position_embeddings": 2048, **c}
    bias = bool(c.get("attention_bias", False))
    return replace(
        _shared(Family.LLAMA, c, ids),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
    )


def _mistral(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096, **c}
    shared = _shared(Family.MISTRAL, c, ids)
    return replace(shared, layer_windows=windows(c, window_of(c), lambda _: True))


def _qwen2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_QWEN, **c}
    return replace(_shared(Family.QWEN2, c, ids), layer_windows=_qwen_windows(c), qkv_bias=True)


def _qwen3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_QWEN, "head_dim": 128, **c}
    bias = bool(c.get("attention_bias", False))
    return replace(
        _shared(Family.QWEN3, c, ids),
        layer_windows=_qwen_windows(c),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QkNorm.HEAD,
    )


def _qwen_windows(c: Fields) -> tuple[int | None, ...]:
    first = integer(c, "max_window_layers")
    window = window_of(c) if c.get("use_sliding_window", False) else None
    return windows(c, window, lambda layer: layer >= first)


HF: Final = (
    HfFamily(("llama",), _llama),
    HfFamily(("mistral",), _mistral),
    HfFamily(("qwen2",), _qwen2),
    HfFamily(("qwen3",), _qwen3),
)
GGUF: Final = (
    # Mistral's files say llama, too.
    GgufFamily("llama", lambda head: decoder_from_gguf(Family.LLAMA, head), neighbours=True),
    GgufFamily("qwen2", lambda head: decoder_from_gguf(Family.QWEN2, head)),
    GgufFamily("qwen3", lambda head: decoder_from_gguf(Family.QWEN3, head)),
)
