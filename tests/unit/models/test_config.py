"""Impossible models are refused before their weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import LayerKind, Recurrence
from specinfer.models.config import Norm, NormPlace, QkNorm
from tests.heads import tiny_body

BODY = tiny_body()  # of 4 heads, and one layer


def test_rms_norms_with_a_bias_are_refused() -> None:
    with pytest.raises(ModelError, match="RMSNorms have a bias"):
        replace(BODY, norm_bias=True)


def test_layers_of_another_form_than_llamas_are_known() -> None:
    assert BODY.plain_layers
    assert replace(BODY, qk_norm=QkNorm.HEAD, qkv_bias=True, layer_windows=(4,)).plain_layers
    others: list[dict[str, Any]] = [
        *({"norm": Norm.LAYER}, {"norm_place": NormPlace.BOTH}, {"gated_mlp": False}, {"rope": None}),
        *({"parallel_block": True}, {"layers_without_rope": frozenset({0})}, {"attention_sinks": True}),
        *({"attention_softcap": 50.0}, {"qkv_clip": 8.0}, {"qk_norm": QkNorm.WHOLE}, {"residual_scale": 0.2}),
    ]
    for changes in others:
        assert not replace(BODY, **changes).plain_layers, changes


def test_recurrences_of_other_sizes_are_refused() -> None:
    good: dict[str, Any] = {"kind": LayerKind.MAMBA2, "taps": 4, "channels": 96, "heads": 4, "groups": 2}
    good |= {"key_size": 8, "value_size": 16}
    Recurrence(**good)
    for wrong, fault in (
        ({"taps": 1}, "a convolution has 1 taps; supported: 2 to 16"),
        ({"taps": 17}, "a convolution has 17 taps"),
        (
            {"groups": 3},
            "4 heads of 16 values and 3 heads of keys; supported: a multiple of the heads of keys",
        ),
        ({"heads": 0}, "heads of the recurrence is 0"),
        ({"value_size": 24}, "4 heads of 24 values .* a multiple of 16 values each"),
    ):
        with pytest.raises(ModelError, match=fault):
            Recurrence(**{**good, **wrong})
