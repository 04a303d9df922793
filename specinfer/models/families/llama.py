"""Llama and its relatives: RMSNorm, rope and a gated MLP.

They differ in biases, windows, norm places, factors and fused projections. Mistral, Qwen2, Qwen3, SmolLM3,
Seed-OSS, ERNIE 4.5, Helium, CWM, EXAONE 4, Granite, and Phi-3 and Phi-4, whose long variants have LongRoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Family, ModelConfig, NormPlace, QkNorm
from specinfer.models.families.mixtures import mixtral_from_gguf
from specinfer.models.fields import Fields, count, integer, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import (
    ALL_BIASED,
    BIASED,
    USUAL,
    ConfigKeys,
    HfFamily,
    defaults,
    refuse,
    rotary_from_hf,
    window_of,
    windows,
)
from specinfer.models.sources import GATE_UP, QKV, Names

# Defaults of transformers for keys that config.json omits.
_DEFAULTS: Final[Fields] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN: Final = defaults(eps=1e-6, context=32768, sliding_window=4096, max_window_layers=28)
_SMOLLM3: Final = defaults(
    eps=1e-6, context=32768, tied=True, num_key_value_heads=4, no_rope_layer_interval=4, rope_theta=2000000.0
)
_SEED: Final = defaults(eps=1e-6, context=524288, num_key_value_heads=8, head_dim=128, attention_bias=True)
_ERNIE: Final = defaults(
    eps=1e-5, context=131072, tied=True, num_key_value_heads=2, head_dim=128, rope_theta=500000.0
)
_HELIUM: Final = defaults(eps=1e-8, context=4096, num_key_value_heads=20, head_dim=128, rope_theta=100000.0)
_CWM: Final = defaults(
    eps=1e-5, context=131072, num_key_value_heads=8, head_dim=128, sliding_window=8192, rope_theta=1000000.0
)
_CWM_ROPE: Final[Fields] = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CWM_ENDS: Final = (128001, 128008, 128009)  # end-of-text ids if config.json has none
_EXAONE: Final = defaults(
    eps=1e-5, context=2048, num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4
)
_GRANITE: Final = defaults(eps=1e-6, context=2048)
_PHI: Final = defaults(eps=1e-5, context=4096, original_max_position_embeddings=4096)
_OLD_NAMES: Final = ("su", "yarn")  # earlier names of longrope


def _shared(family: Family, c: Fields, ids: Sequence[Fields], keys: ConfigKeys = USUAL) -> ModelConfig:
    refuse(c, "attn_logit_softcapping", "use_bidirectional_attention")
    return rotary_from_hf(family, c, ids, keys)


def _llama(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    return _shared(Family.LLAMA, {**_DEFAULTS, "max_position_embeddings": 2048, **c}, ids, ALL_BIASED)


def _mistral(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096, **c}
    shared = _shared(Family.MISTRAL, c, ids)
    return replace(shared, layer_windows=windows(c, window_of(c), lambda _: True))


def _qwen2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_QWEN, **c}
    return replace(_shared(Family.QWEN2, c, ids), layer_windows=_qwen_windows(c), qkv_bias=True)


def _qwen3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_QWEN, "head_dim": 128, **c}
    shared = _shared(Family.QWEN3, c, ids, BIASED)
    return replace(shared, layer_windows=_qwen_windows(c), qk_norm=QkNorm.HEAD)


def _smollm3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_SMOLLM3, **c}
    shared = _shared(Family.SMOLLM3, c, ids, ALL_BIASED)
    plain = _without_rope(c, shared.num_layers)
    window = window_of(c) if c.get("use_sliding_window", False) else None
    return replace(
        shared,
        layer_windows=windows(c, window, lambda layer: layer in plain),
        layers_without_rope=plain,
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


def _like(
    family: Family, defaults: Fields, keys: ConfigKeys
) -> Callable[[Fields, Sequence[Fields]], ModelConfig]:
    """A config reader for a Llama with these defaults and keys."""
    return lambda c, ids: rotary_from_hf(family, {**defaults, **c}, ids, keys)


def _cwm(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_CWM, **c}
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        c = {**c, "rope_parameters": _CWM_ROPE}
    if c["sliding_window"] == 0:  # as in transformers
        c = {**c, "sliding_window": None}
    shared = rotary_from_hf(Family.CWM, c, ids, ConfigKeys(mlp_bias="mlp_bias"))
    return replace(
        shared,
        layer_windows=windows(c, window_of(c), lambda layer: layer % 4 != 0),
        eos_ids=shared.eos_ids or _CWM_ENDS,
    )


def _exaone(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_EXAONE, **c}
    window = window_of(c)
    # The pattern is ignored if layer_types is set; it is "LLLG" in some files.
    ignored = window is None or c.get("layer_types") is not None
    pattern = 1 if ignored else count(c, "sliding_window_pattern")
    shared = rotary_from_hf(Family.EXAONE4, c, ids)
    return _behind(shared, windows(c, window, lambda layer: (layer + 1) % pattern != 0), window)


def _behind(shared: ModelConfig, found: tuple[int | None, ...], window: int | None) -> ModelConfig:
    """Add EXAONE's norms; if some layers have a window, the others have no rope."""
    plain = [] if window is None else [layer for layer, own in enumerate(found) if own is None]
    return replace(
        shared,
        layer_windows=found,
        layers_without_rope=frozenset(plain),
        qk_norm=QkNorm.HEAD,
        norm_place=NormPlace.BEHIND,
    )


def _exaone_from_gguf(head: GgufHead) -> ModelConfig:
    shared, window = decoder_from_gguf(Family.EXAONE4, head), gguf_window(head.fields)
    pattern = count(head.fields, "attention.sliding_window_pattern", 4)
    found = tuple(window if (layer + 1) % pattern else None for layer in range(shared.num_layers))
    return _behind(shared, found, window)


def _granite(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GRANITE, **c}
    return replace(
        rotary_from_hf(Family.GRANITE, c, ids, ALL_BIASED),
        embedding_scale=positive(c, "embedding_multiplier", 1.0),
        attention_scale=positive(c, "attention_multiplier", 1.0),
        residual_scale=positive(c, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive(c, "logits_scaling", 1.0),
    )


def _granite_from_gguf(head: GgufHead) -> ModelConfig:
    divided = positive(head.fields, "logit_scale", 1.0)
    return replace(decoder_from_gguf(Family.GRANITE, head), logit_scale=1.0 / divided)


def _phi3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = _with_new_names({**_PHI, **c})
    shared = rotary_from_hf(Family.PHI3, c, ids)
    window = window_of(c)
    if window is not None and window >= integer(c, "max_position_embeddings"):
        window = None  # Phi-4-mini's exceeds its context
    return replace(shared, layer_windows=(window,) * shared.num_layers)


def _with_new_names(c: Fields) -> Fields:
    """Replace the earlier names of longrope."""
    key = "rope_scaling" if c.get("rope_parameters") is None else "rope_parameters"
    rope = c.get(key)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in _OLD_NAMES:
        return c
    return {**c, key: {**rope, "rope_type": "longrope"}}


HF: Final = (
    HfFamily(("llama",), _llama),
    HfFamily(("mistral",), _mistral),
    HfFamily(("qwen2",), _qwen2),
    HfFamily(("qwen3",), _qwen3),
    HfFamily(("smollm3",), _smollm3),
    HfFamily(
        ("seed_oss",),
        _like(Family.SEED_OSS, _SEED, replace(ALL_BIASED, o_bias="attention_out_bias")),
    ),
    HfFamily(
        ("ernie4_5",),
        _like(
            Family.ERNIE4_5, _ERNIE, ConfigKeys(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias")
        ),
        Names(neighbours=True),
    ),
    HfFamily(
        ("helium",),
        _like(Family.HELIUM, _HELIUM, replace(ALL_BIASED, o_bias="")),
        Names(neighbours=True),
    ),
    HfFamily(("cwm",), _cwm),
    HfFamily(("exaone4",), _exaone),
    HfFamily(("granite",), _granite),
    HfFamily(
        ("phi3",),
        _phi3,
        Names(inside={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}),
    ),
)
GGUF: Final = (
    GgufFamily("llama", _llama_from_gguf, neighbours=True),
    GgufFamily("qwen2", lambda head: decoder_from_gguf(Family.QWEN2, head)),
    GgufFamily("qwen3", lambda head: decoder_from_gguf(Family.QWEN3, head)),
    GgufFamily("smollm3", _smollm3_from_gguf, neighbours=True),
    GgufFamily(
        "seed_oss",
        lambda head: decoder_from_gguf(Family.SEED_OSS, head),
        {**INSIDE, "post_attention_norm": "post_attention_layernorm"},
    ),
    GgufFamily("ernie4_5", lambda head: decoder_from_gguf(Family.ERNIE4_5, head), neighbours=True),
    GgufFamily(
        "exaone4",
        _exaone_from_gguf,
        {
            **INSIDE,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    GgufFamily("granite", _granite_from_gguf, neighbours=True),
    GgufFamily(
        "phi3",
        lambda head: decoder_from_gguf(Family.PHI3, head),
        {**INSIDE, "attn_qkv": QKV, "ffn_up": GATE_UP},
    ),
)
