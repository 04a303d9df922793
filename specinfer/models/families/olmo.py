"""OLMo: LayerNorms without weights in OLMo 1; norms after blocks, and of q and k, in OLMo 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.models.config import Family, ModelConfig, Norm, NormPlace, QkNorm
from specinfer.models.fields import Fields, optional_positive, positive
from specinfer.models.gguf_config import BEHIND, GgufFamily, GgufHead
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.gguf_config import windows as gguf_windows
from specinfer.models.hf_config import BIASED, HfFamily, but_every, defaults, head_dim, window_of, windows
from specinfer.models.positions import Rope, ropes_by_layer_type
from specinfer.models.sources import Names

_DEFAULTS: Final = defaults(eps=1e-5, context=2048)
_OLMO: Final[Fields] = {**_DEFAULTS, "clip_qkv": None}
_OLMO_3: Final[Fields] = {**_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096}
_LAYER: Final[Mapping[str, Any]] = {"norm": Norm.LAYER}
_NORMS: Final[Mapping[str, Any]] = {"qk_norm": QkNorm.WHOLE, "norm_place": NormPlace.BEHIND}
_HAS_WINDOW: Final = but_every(4)


def _olmo(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, qkv_clip=optional_positive(c, "clip_qkv"))


def _olmo_3_ropes(c: Fields) -> tuple[Rope, Rope | None]:
    """Rope scaling applies to layers without a window."""
    theta = positive(c, "rope_theta")
    rope, local_rope = ropes_by_layer_type(c, head_dim(c), theta=theta, local_theta=theta)
    return rope, None if local_rope == rope else local_rope


def _olmo_3(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, layer_windows=windows(c, window_of(c), _HAS_WINDOW))


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
        layer_windows=gguf_windows(config, head, _HAS_WINDOW),
    )


_ONES: Final = ("model.norm", "input_layernorm", "post_attention_layernorm")
HF: Final = (
    HfFamily(
        ("olmo",),
        Family.OLMO,
        _OLMO,
        BIASED,
        _olmo,
        _LAYER,
        given=lambda c: {**c, "rms_norm_eps": 1e-5},  # no key holds it
        names=Names(ones=_ONES),
    ),
    HfFamily(("olmo2",), Family.OLMO2, _DEFAULTS, BIASED, fixed=_NORMS),
    HfFamily(("olmo3",), Family.OLMO3, _OLMO_3, BIASED, _olmo_3, _NORMS, ropes=_olmo_3_ropes),
)
GGUF: Final = (
    GgufFamily("olmo", Family.OLMO, fixed=_LAYER, neighbours=True, ones=_ONES),
    GgufFamily("olmo2", Family.OLMO2, _olmo_2_from_gguf, _NORMS, BEHIND),
)
