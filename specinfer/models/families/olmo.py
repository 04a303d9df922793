"""OLMo: LayerNorms without weights in OLMo 1; norms after blocks, and of q and k, in OLMo 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, Norm, NormPlace, QkNorm
from specinfer.models.fields import Fields, optional_positive, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf, window_of
from specinfer.models.hf_config import (
    BIASED,
    HfFamily,
    decoder_from_hf,
    defaults,
    head_dim,
    rotary_from_hf,
    windows,
)
from specinfer.models.hf_config import window_of as hf_window
from specinfer.models.positions import ropes_by_layer_type
from specinfer.models.sources import Names

_DEFAULTS: Final = defaults(eps=1e-5, context=2048)
_OLMO_3: Final[Fields] = {**_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096}
_WINDOW_EVERY: Final = 4  # the last of four layers has no window


def _olmo(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_DEFAULTS, **c, "rms_norm_eps": 1e-5}  # no key holds it
    shared = rotary_from_hf(Family.OLMO, c, ids, BIASED)
    return replace(shared, qkv_clip=optional_positive(c, "clip_qkv"), norm=Norm.LAYER)


def _olmo_2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    return _behind(rotary_from_hf(Family.OLMO2, {**_DEFAULTS, **c}, ids, BIASED))


def _olmo_3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    """Rope scaling applies to layers without a window."""
    c = {**_OLMO_3, **c}
    theta = positive(c, "rope_theta")
    rope, local_rope = ropes_by_layer_type(c, head_dim(c), theta=theta, local_theta=theta)
    return replace(
        _behind(decoder_from_hf(Family.OLMO3, c, ids, BIASED, rope=rope)),
        local_rope=None if local_rope == rope else local_rope,
        layer_windows=windows(c, hf_window(c), lambda layer: (layer + 1) % _WINDOW_EVERY != 0),
    )


def _behind(shared: ModelConfig) -> ModelConfig:
    """Add the norms of OLMo 2 and 3."""
    return replace(shared, qk_norm=QkNorm.WHOLE, norm_place=NormPlace.BEHIND)


def _olmo_2_from_gguf(head: GgufHead) -> ModelConfig:
    """Reads OLMo 3 as well, whose files have the architecture olmo2 and a window."""
    shared = decoder_from_gguf(Family.OLMO2, head)
    window, rope = window_of(head.fields), shared.rope
    assert rope is not None
    if window is not None:
        local_rope = replace(rope, yarn=None, linear_factor=1.0)
        shared = replace(
            shared,
            family=Family.OLMO3,
            local_rope=None if local_rope == rope else local_rope,
            layer_windows=tuple(
                window if (layer + 1) % _WINDOW_EVERY else None for layer in range(shared.num_layers)
            ),
        )
    return _behind(shared)


_ONES: Final = ("model.norm", "input_layernorm", "post_attention_layernorm")
HF: Final = (
    HfFamily(("olmo",), _olmo, Names(ones=_ONES)),
    HfFamily(("olmo2",), _olmo_2),
    HfFamily(("olmo3",), _olmo_3),
)
GGUF: Final = (
    GgufFamily(
        "olmo",
        lambda head: decoder_from_gguf(Family.OLMO, head, norm=Norm.LAYER),
        neighbours=True,
        ones=_ONES,
    ),
    GgufFamily(
        "olmo2",
        _olmo_2_from_gguf,
        {
            **INSIDE,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
)
