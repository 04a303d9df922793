"""Like Llama, with other biases, windows, norm places, factors or fused projections.

Seed-OSS, ERNIE 4.5, Helium, CWM, EXAONE 4, Granite, and Phi-3 and Phi-4, whose long variants have LongRoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, NormPlace, QkNorm
from specinfer.models.fields import Fields, count, integer, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import HfFamily, decoder_from_hf, head_dim, window_of, windows
from specinfer.models.positions import rope_from_hf
from specinfer.models.sources import GATE_UP, QKV, Names

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
_GRANITE: Final[Fields] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
_PHI: Final[Fields] = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_OLD_NAMES: Final = ("su", "yarn")  # earlier names of longrope


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


def _granite(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GRANITE, **c}
    bias = bool(c.get("attention_bias", False))
    return replace(
        decoder_from_hf(Family.GRANITE, c, ids, rope=rope_from_hf(c, head_dim(c))),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
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
    shared = decoder_from_hf(Family.PHI3, c, ids, rope=rope_from_hf(c, head_dim(c)))
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
    HfFamily(("granite",), _granite),
    HfFamily(
        ("phi3",),
        _phi3,
        Names(inside={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}),
    ),
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
    GgufFamily("granite", _granite_from_gguf, neighbours=True),
    GgufFamily(
        "phi3",
        lambda head: decoder_from_gguf(Family.PHI3, head),
        {**INSIDE, "attn_qkv": QKV, "ffn_up": GATE_UP},
    ),
)
