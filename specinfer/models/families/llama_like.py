"""Seed-OSS, ERNIE 4.5, Helium, CWM and EXAONE 4: like Llama, with other biases, windows or norm places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, NormPlace, QkNorm
from specinfer.models.fields import Fields, count
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim, window_of, windows
from specinfer.models.positions import rope_from_hf
from specinfer.models.sources import Names

_SEED: Final[Fields] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 524288,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
_ERNIE: Final[Fields] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_HELIUM: Final[Fields] = {
    "rms_norm_eps": 1e-8,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "rope_theta": 100000.0,
    "tie_word_embeddings": False,
}
_CWM: Final[Fields] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 8192,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_CWM_ROPE: Final[Fields] = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CWM_ENDS: Final = (128001, 128008, 128009)  # end-of-text ids if config.json has none
_EXAONE: Final[Fields] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": False,
}


def _like(
    family: Family, defaults: Fields, *, qkv: str, o: str, mlp: str
) -> Callable[[Fields, Sequence[Fields]], ModelConfig]:
    """A config reader for a Llama whose biases have these keys; an empty key: no biases."""

    def read(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
        c = {**defaults, **c}
        return replace(
            decoder_from_hf(family, c, ids, rope=rope_from_hf(c, head_dim(c))),
            qkv_bias=bool(c.get(qkv, False)),
            o_bias=bool(c.get(o, False)),
            mlp_bias=bool(c.get(mlp, False)),
        )

    return read


def _cwm(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_CWM, **c}
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        c = {**c, "rope_parameters": _CWM_ROPE}
    if c["sliding_window"] == 0:  # as in transformers
        c = {**c, "sliding_window": None}
    shared = _like(Family.CWM, {}, qkv="", o="", mlp="mlp_bias")(c, ids)
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
    shared = _like(Family.EXAONE4, {}, qkv="", o="", mlp="")(c, ids)
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


HF: Final = (
    HfFamily(
        ("seed_oss",),
        _like(Family.SEED_OSS, _SEED, qkv="attention_bias", o="attention_out_bias", mlp="mlp_bias"),
    ),
    HfFamily(
        ("ernie4_5",),
        _like(Family.ERNIE4_5, _ERNIE, qkv="use_bias", o="use_bias", mlp="use_bias"),
        Names(neighbours=True),
    ),
    HfFamily(
        ("helium",),
        _like(Family.HELIUM, _HELIUM, qkv="attention_bias", o="", mlp="mlp_bias"),
        Names(neighbours=True),
    ),
    HfFamily(("cwm",), _cwm),
    HfFamily(("exaone4",), _exaone),
)
GGUF: Final = (
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
)
