"""Llama, Mistral, Qwen2, Qwen3 and SmolLM3: RMSNorm, rope, a gated MLP; they differ in biases and windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Family, ModelConfig, QkNorm
from specinfer.models.families.mixtures import mixtral_from_gguf
from specinfer.models.fields import Fields, count, integer
from specinfer.models.gguf_config import GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim, refuse, window_of, windows
from specinfer.models.positions import rope_from_hf

# Defaults of transformers for keys that config.json omits.
_DEFAULTS: Final[Fields] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN: Final[Fields] = {
    **_DEFAULTS,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_SMOLLM3: Final[Fields] = {
    **_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


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


def _smollm3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_SMOLLM3, **c}
    shared, bias = _shared(Family.SMOLLM3, c, ids), bool(c.get("attention_bias", False))
    plain = _without_rope(c, shared.num_layers)
    window = window_of(c) if c.get("use_sliding_window", False) else None
    return replace(
        shared,
        layer_windows=windows(c, window, lambda layer: layer in plain),
        layers_without_rope=plain,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
    )


def _without_rope(c: Fields, layers: int) -> frozenset[int]:
    """The layers without rope: every fourth, or those whose entry of a list is 0."""
    flags = c.get("no_rope_layers")
    if flags is None:
        every = count(c, "no_rope_layer_interval")
        flags = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or any(one not in (0, 1) for one in flags):
        raise ModelError(
            f"no_rope_layers is {str(flags)[:80]}; expected 0 or 1 for each of {layers} layers. "
            "The config is damaged."
        )
    return frozenset(layer for layer in range(layers) if not flags[layer])


def _smollm3_from_gguf(head: GgufHead) -> ModelConfig:
    """No key holds the layers without rope; llama.cpp uses every fourth."""
    shared = decoder_from_gguf(Family.SMOLLM3, head)
    return replace(shared, layers_without_rope=_without_rope(_SMOLLM3, shared.num_layers))


def _qwen_windows(c: Fields) -> tuple[int | None, ...]:
    first = integer(c, "max_window_layers")
    window = window_of(c) if c.get("use_sliding_window", False) else None
    return windows(c, window, lambda layer: layer >= first)


def _llama_from_gguf(head: GgufHead) -> ModelConfig:
    """Files of Mistral and Mixtral have the architecture llama, too."""
    if integer(head.fields, "expert_count", 0):
        return mixtral_from_gguf(head)
    return decoder_from_gguf(Family.LLAMA, head)


HF: Final = (
    HfFamily(("llama",), _llama),
    HfFamily(("mistral",), _mistral),
    HfFamily(("qwen2",), _qwen2),
    HfFamily(("qwen3",), _qwen3),
    HfFamily(("smollm3",), _smollm3),
)
GGUF: Final = (
    GgufFamily("llama", _llama_from_gguf, neighbours=True),
    GgufFamily("qwen2", lambda head: decoder_from_gguf(Family.QWEN2, head)),
    GgufFamily("qwen3", lambda head: decoder_from_gguf(Family.QWEN3, head)),
    GgufFamily("smollm3", _smollm3_from_gguf, neighbours=True),
)
