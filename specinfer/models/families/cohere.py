"""Cohere's Command models: parallel attention and MLP after one LayerNorm, rope of adjacent elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.models.config import Family, ModelConfig, Norm
from specinfer.models.fields import Fields, count, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import (
    ConfigKeys,
    HfFamily,
    decoder_from_hf,
    head_dim,
    refuse,
    window_of,
    windows,
)
from specinfer.models.positions import rope_from_hf
from specinfer.models.sources import Names

_COHERE: Final[Fields] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
_COHERE_2: Final[Fields] = {
    **_COHERE,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_KEYS: Final = ConfigKeys(norm_eps="layer_norm_eps")


def _cohere(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_COHERE, **c}
    refuse(c, "use_qk_norm")
    return _side_by_side(_shared(Family.COHERE, c, ids), positive(c, "logit_scale"))


def _cohere_2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_COHERE_2, **c}
    pattern = count(c, "sliding_window_pattern")
    found = windows(c, window_of(c), lambda layer: (layer + 1) % pattern != 0)
    return _windowed(_side_by_side(_shared(Family.COHERE2, c, ids), positive(c, "logit_scale")), found)


def _shared(family: Family, c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    bias = bool(c.get("attention_bias", False))
    shared = decoder_from_hf(family, c, ids, rope=rope_from_hf(c, head_dim(c)), keys=_KEYS)
    return replace(shared, qkv_bias=bias, o_bias=bias)


def _side_by_side(shared: ModelConfig, logit_scale: float) -> ModelConfig:
    return replace(shared, norm=Norm.LAYER, parallel_block=True, shared_norm=True, logit_scale=logit_scale)


def _windowed(shared: ModelConfig, found: tuple[int | None, ...]) -> ModelConfig:
    """Set these windows; layers without a window have no rope either."""
    plain = frozenset(layer for layer, window in enumerate(found) if window is None)
    return replace(shared, layer_windows=found, layers_without_rope=plain)


def _from_gguf(family: Family, head: GgufHead) -> ModelConfig:
    shared = decoder_from_gguf(family, head, norm=Norm.LAYER)
    return _side_by_side(shared, positive(head.fields, "logit_scale"))


def _cohere_2_from_gguf(head: GgufHead) -> ModelConfig:
    shared, window = _from_gguf(Family.COHERE2, head), gguf_window(head.fields)
    pattern = count(head.fields, "attention.sliding_window_pattern", 4)
    return _windowed(
        shared,
        tuple(window if (layer + 1) % pattern else None for layer in range(shared.num_layers)),
    )


HF: Final = (
    HfFamily(("cohere",), _cohere, Names(neighbours=True)),
    HfFamily(("cohere2",), _cohere_2, Names(neighbours=True)),
)
GGUF: Final = (
    GgufFamily("command-r", lambda head: _from_gguf(Family.COHERE, head), INSIDE, neighbours=True),
    GgufFamily("cohere2", _cohere_2_from_gguf, INSIDE, neighbours=True),
)
