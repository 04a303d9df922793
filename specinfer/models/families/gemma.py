"""Gemma: norms before and after each block, scaled embeddings, GELU, windows in some of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, NormPlace, QkNorm
from specinfer.models.fields import Fields, count, optional_positive, positive
from specinfer.models.gguf_config import BOTH_SIDES, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import (
    BIASED,
    HfFamily,
    decoder_from_hf,
    defaults,
    head_dim,
    refuse,
    rotary_from_hf,
    window_of,
    windows,
)
from specinfer.models.positions import Rope, ropes_by_layer_type

# Defaults of transformers for keys that config.json omits, as Gemma's own files often do.
_GEMMA_3: Final = defaults(
    eps=1e-6,
    context=131072,
    tied=True,
    vocab_size=262208,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    hidden_activation="gelu_pytorch_tanh",
)
_GEMMA_2: Final = defaults(
    eps=1e-6,
    context=8192,
    tied=True,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
    hidden_activation="gelu_pytorch_tanh",
)
_GEMMA: Final = defaults(
    eps=1e-6, context=8192, tied=True, num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh"
)
_KEYS: Final = replace(BIASED, activation="hidden_activation")


def _gemma(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GEMMA, **c}
    if c.get("hidden_act") == "gelu":  # the first files say gelu, and mean the approximation
        c = {**c, "hidden_act": "gelu_pytorch_tanh"}
    refuse(c, "use_bidirectional_attention")
    shared = rotary_from_hf(Family.GEMMA, c, ids, BIASED)
    return replace(shared, embedding_scale=shared.hidden_size**0.5, norm_weight_offset=1.0)


def _gemma_from_gguf(head: GgufHead) -> ModelConfig:
    shared = decoder_from_gguf(Family.GEMMA, head)
    return replace(shared, embedding_scale=shared.hidden_size**0.5, activation=Activation.GELU_TANH)


def _gemma2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GEMMA_2, **c}
    refuse(c, "use_bidirectional_attention")
    shared = rotary_from_hf(Family.GEMMA2, c, ids, _KEYS)
    return replace(
        shared,
        layer_windows=windows(c, window_of(c), lambda layer: layer % 2 == 0),
        embedding_scale=shared.hidden_size**0.5,
        norm_weight_offset=1.0,
        norm_place=NormPlace.BOTH,
        attention_scale=positive(c, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=optional_positive(c, "attn_logit_softcapping"),
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
    )


def _gemma2_from_gguf(head: GgufHead) -> ModelConfig:
    c, shared = head.fields, decoder_from_gguf(Family.GEMMA2, head)
    window, layers = gguf_window(c), shared.num_layers
    # No key holds query_pre_attn_scalar; among the Gemma 2 models only the 27B's differs from head_dim.
    scalar = shared.hidden_size / shared.num_heads if layers == 46 else float(shared.head_dim)
    return replace(
        shared,
        layer_windows=tuple(None if i % 2 else window for i in range(layers)),
        embedding_scale=shared.hidden_size**0.5,
        norm_place=NormPlace.BOTH,
        activation=Activation.GELU_TANH,
        attention_scale=scalar**-0.5,
        attention_softcap=positive(c, "attn_logit_softcapping", 50.0),
        logit_softcap=positive(c, "final_logit_softcapping", 30.0),
    )


def _gemma3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GEMMA_3, **c}
    refuse(c, "attn_logit_softcapping", "use_bidirectional_attention")
    rope, local_rope = ropes_by_layer_type(
        c,
        head_dim(c),
        theta=positive(c, "rope_theta", 1e4),
        local_theta=positive(c, "rope_local_base_freq", 1e4),
    )
    shared = decoder_from_hf(Family.GEMMA3, c, ids, _KEYS, rope=rope)
    pattern = count(c, "sliding_window_pattern")
    return replace(
        shared,
        local_rope=local_rope,
        layer_windows=windows(c, window_of(c), lambda layer: (layer + 1) % pattern != 0),
        qk_norm=QkNorm.HEAD,
        embedding_scale=shared.hidden_size**0.5,
        norm_weight_offset=1.0,
        norm_place=NormPlace.BOTH,
        attention_scale=positive(c, "query_pre_attn_scalar", float(shared.head_dim)) ** -0.5,
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
    )


def _gemma3_from_gguf(head: GgufHead) -> ModelConfig:
    c = head.fields
    shared = decoder_from_gguf(Family.GEMMA3, head, theta=1e6)
    rope, layers = shared.rope, shared.num_layers
    assert rope is not None
    rotated = count(c, "rope.dimension_count", shared.head_dim)
    if count(c, "rope.dimension_count_swa", rotated) != rotated:
        raise ModelError(
            "layers of the GGUF file rotate different parts of a head; supported: the same part in all layers"
        )
    if rope.yarn is not None:
        raise ModelError("the GGUF file is a Gemma 3 with YaRN, which is not supported")
    window, pattern = gguf_window(c), count(c, "attention.sliding_window_pattern", 6)
    # No key holds query_pre_attn_scalar; among the Gemma 3 models only the 27B's differs from head_dim.
    scalar = shared.hidden_size / shared.num_heads if layers == 62 else float(shared.head_dim)
    return replace(
        shared,
        local_rope=Rope(positive(c, "rope.freq_base_swa", 1e4), rotated=rope.rotated),
        layer_windows=tuple(window if (i + 1) % pattern else None for i in range(layers)),
        embedding_scale=shared.hidden_size**0.5,
        norm_weight_offset=0.0,  # the converter has already added Gemma's 1
        norm_place=NormPlace.BOTH,
        activation=Activation.GELU_TANH,
        attention_scale=scalar**-0.5,
    )


HF: Final = (
    HfFamily(("gemma",), _gemma),
    HfFamily(("gemma2",), _gemma2),
    HfFamily(
        ("gemma3", "gemma3_text"),
        _gemma3,
        text_in=("gemma3",),
        others=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    ),
)
GGUF: Final = (
    GgufFamily("gemma", _gemma_from_gguf),
    GgufFamily("gemma2", _gemma2_from_gguf, BOTH_SIDES),
    GgufFamily(
        "gemma3",
        _gemma3_from_gguf,
        BOTH_SIDES,
    ),
)
