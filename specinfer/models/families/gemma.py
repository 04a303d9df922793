"""Gemma and OLMo: norms after blocks, and windows in some of the layers.

Gemma 2 and 3 have norms before and after each block, scaled embeddings and GELU. OLMo 1 has LayerNorms
without weights; OLMo 2 and 3 have norms after blocks, and of q and k.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Norm, NormPlace, QkNorm
from specinfer.models.fields import Fields, count, optional_positive, positive
from specinfer.models.gguf_config import BEHIND, BOTH_SIDES, GgufFamily, GgufHead
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.gguf_config import windows as gguf_windows
from specinfer.models.hf_config import BIASED, HfFamily, but_every, defaults, head_dim, window_of, windows
from specinfer.models.positions import Rope, ropes_by_layer_type
from specinfer.models.sources import Names

# Defaults of transformers for keys that config.json omits, as Gemma's own files often do.
HEADS: Final[Fields] = {
    **defaults(eps=1e-6, context=131072, tied=True, num_attention_heads=8, num_key_value_heads=4),
    **{"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
}
_GEMMA_3: Final[Fields] = {
    **{**HEADS, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6},
    **{"vocab_size": 262208, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
}
_GEMMA_2: Final[Fields] = {
    **{**HEADS, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
}
_GEMMA: Final = defaults(
    eps=1e-6, context=8192, tied=True, num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh"
)
KEYS: Final = replace(BIASED, activation="hidden_activation")
_BOTH: Final[Mapping[str, Any]] = {"norm_place": NormPlace.BOTH}
_OFFSET: Final[Mapping[str, Any]] = {"norm_weight_offset": 1.0}  # in GGUF files weights have it already
_GELU: Final[Mapping[str, Any]] = {"activation": Activation.GELU_TANH}
_OLMO_2: Final = defaults(eps=1e-5, context=2048)
_OLMO: Final[Fields] = {**_OLMO_2, "clip_qkv": None}
_OLMO_3: Final[Fields] = {**_OLMO_2, "rope_theta": 500000.0, "sliding_window": 4096}
_OLMO_LAYER: Final[Mapping[str, Any]] = {"norm": Norm.LAYER}
_OLMO_NORMS: Final[Mapping[str, Any]] = {"qk_norm": QkNorm.WHOLE, "norm_place": NormPlace.BEHIND}
_OLMO_WINDOWS: Final = but_every(4)


def _scaled(config: ModelConfig, _: object) -> ModelConfig:
    return replace(config, embedding_scale=config.hidden_size**0.5)


def _with_exact_name(c: Fields) -> Fields:
    """The first files say gelu, and mean the approximation."""
    return {**c, "hidden_act": "gelu_pytorch_tanh"} if c.get("hidden_act") == "gelu" else c


def _gemma2(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(
        _scaled(config, c),
        layer_windows=windows(c, window_of(c), but_every(2)),
        attention_scale=positive(c, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=optional_positive(c, "attn_logit_softcapping"),
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
    )


def _gemma2_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    return replace(
        _scaled(config, head),
        layer_windows=gguf_windows(config, head, but_every(2)),
        attention_scale=_gguf_scale(config, 46),
        attention_softcap=positive(head.fields, "attn_logit_softcapping", 50.0),
        logit_softcap=positive(head.fields, "final_logit_softcapping", 30.0),
    )


def _gguf_scale(config: ModelConfig, largest: int) -> float:
    """No key holds query_pre_attn_scalar; only the 27B's, of `largest` layers, differs from head_dim."""
    is_largest = config.num_layers == largest
    scalar = config.hidden_size / config.num_heads if is_largest else float(config.head_dim)
    return float(scalar**-0.5)


def ropes(c: Fields) -> tuple[Rope, Rope]:
    """The embeddings of layers without a window, and of those with one."""
    theta, local_theta = positive(c, "rope_theta", 1e6), positive(c, "rope_local_base_freq", 1e4)
    return ropes_by_layer_type(c, head_dim(c), theta=theta, local_theta=local_theta)


def _gemma3(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(
        _scaled(config, c),
        layer_windows=windows(c, window_of(c), but_every(count(c, "sliding_window_pattern"))),
        attention_scale=positive(c, "query_pre_attn_scalar", float(config.head_dim)) ** -0.5,
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
    )


def _gemma3_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c, rope = head.fields, config.rope
    assert rope is not None
    rotated = count(c, "rope.dimension_count", config.head_dim)
    if count(c, "rope.dimension_count_swa", rotated) != rotated:
        raise ModelError(
            "layers of the GGUF file rotate different parts of a head; supported: the same part in all layers"
        )
    if rope.yarn is not None:
        raise ModelError("the GGUF file is a Gemma 3 with YaRN, which is not supported")
    pattern = count(c, "attention.sliding_window_pattern", 6)
    return replace(
        _scaled(config, head),
        local_rope=Rope(positive(c, "rope.freq_base_swa", 1e4), rotated=rope.rotated),
        layer_windows=gguf_windows(config, head, but_every(pattern)),
        attention_scale=_gguf_scale(config, 62),
    )


def _olmo(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, qkv_clip=optional_positive(c, "clip_qkv"))


def _olmo_3_ropes(c: Fields) -> tuple[Rope, Rope | None]:
    """Rope scaling applies to layers without a window."""
    theta = positive(c, "rope_theta")
    rope, local_rope = ropes_by_layer_type(c, head_dim(c), theta=theta, local_theta=theta)
    return rope, None if local_rope == rope else local_rope


def _olmo_3(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, layer_windows=windows(c, window_of(c), _OLMO_WINDOWS))


def _olmo_2_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    """Reads OLMo 3 as well, whose files have the architecture olmo2 and a window."""
    rope = config.rope
    assert rope is not None
    if gguf_window(head.fields) is None:
        return config
    local_rope = replace(rope, yarn=None, linear_factor=1.0)
    return replace(
        config,
        family=Family.OLMO3,
        local_rope=None if local_rope == rope else local_rope,
        layer_windows=gguf_windows(config, head, _OLMO_WINDOWS),
    )


_ONES: Final = ("model.norm", "input_layernorm", "post_attention_layernorm")
HF: Final = (
    HfFamily(Family.GEMMA, _GEMMA, BIASED, _scaled, _OFFSET, given=_with_exact_name),
    HfFamily(Family.GEMMA2, _GEMMA_2, KEYS, _gemma2, {**_OFFSET, **_BOTH}),
    HfFamily(
        Family.GEMMA3,
        _GEMMA_3,
        KEYS,
        _gemma3,
        {**_OFFSET, **_BOTH, "qk_norm": QkNorm.HEAD},
        ropes=ropes,
        also=("gemma3_text",),
    ),
    HfFamily(
        Family.OLMO,
        _OLMO,
        BIASED,
        _olmo,
        _OLMO_LAYER,
        given=lambda c: {**c, "rms_norm_eps": 1e-5},  # no key holds it
        names=Names(ones=_ONES),
    ),
    HfFamily(Family.OLMO2, _OLMO_2, BIASED, fixed=_OLMO_NORMS),
    HfFamily(Family.OLMO3, _OLMO_3, BIASED, _olmo_3, _OLMO_NORMS, ropes=_olmo_3_ropes),
)
GGUF: Final = (
    GgufFamily("gemma", Family.GEMMA, _scaled, _GELU),
    GgufFamily("gemma2", Family.GEMMA2, _gemma2_from_gguf, {**_GELU, **_BOTH}, BOTH_SIDES),
    GgufFamily("gemma3", Family.GEMMA3, _gemma3_from_gguf, {**_GELU, **_BOTH}, BOTH_SIDES, theta=1e6),
    GgufFamily("olmo", Family.OLMO, fixed=_OLMO_LAYER, neighbours=True, ones=_ONES),
    GgufFamily("olmo2", Family.OLMO2, _olmo_2_from_gguf, _OLMO_NORMS, BEHIND),
)
