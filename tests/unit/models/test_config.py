"""Impossible models are refused before their weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specinfer.errors import ModelError
from specinfer.models.config import Norm, NormPlace, QkNorm
from specinfer.models.positions import Alibi
from tests.heads import tiny_body

BODY = tiny_body()  # of 4 heads, and one layer


BEHIND = {"parallel_block": True, "norm_place": NormPlace.BEHIND}
LEARNED = {"rope": None, "learned_positions": True}


def test_switches_that_do_not_go_together_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"learned_positions": True}, "has rope and learned positions; supported: one of rope, learned pos"),
        ({"alibi": Alibi.of(4)}, "the model has rope and ALiBi"),
        ({"rope": None, "alibi": Alibi.of(8)}, "ALiBi has 8 slopes for 4 heads"),
        ({"position_offset": 2}, "position_offset is 2; allowed: 0, or more where positions are learned"),
        ({**LEARNED, "position_offset": -1}, "position_offset is -1; allowed: 0"),
        ({"layers_without_rope": frozenset({0, 1})}, r"layers \[1\] have no rope, of 1 layers"),
        ({"norm_bias": True}, "RMSNorms have a bias"),
        ({"shared_norm": True}, "shared_norm is set without parallel_block"),
        (BEHIND, "attention and MLP are parallel, with norms in place behind; supported: before"),
        ({"qkv_clip": 0.0}, "qkv_clip is 0.0; allowed: more than 0"),
        ({"attention_softcap": float("nan")}, "attention_softcap is nan"),
        ({"residual_scale": float("inf")}, "residual_scale is inf"),
        ({"logit_scale": -1.0}, "logit_scale is -1.0"),
    ]
    for changes, words in cases:
        with pytest.raises(ModelError, match=words):
            replace(BODY, **changes)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert Alibi.of(8).slopes == tuple(2.0**-i for i in range(1, 9))
    assert Alibi.of(1).slopes == (2.0**-8,)
    # 6 heads have the slopes of 4 heads, and the first and third of 8.
    assert Alibi.of(6).slopes == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)
    assert Alibi.of(2, steepest=4.0).slopes == (2.0**-2, 2.0**-4)


def test_layers_of_another_form_than_llamas_are_known() -> None:
    assert BODY.plain_layers
    assert replace(BODY, qk_norm=QkNorm.HEAD, qkv_bias=True, layer_windows=(4,)).plain_layers
    others: list[dict[str, Any]] = [
        *({"norm": Norm.LAYER}, {"norm_place": NormPlace.BOTH}, {"gated_mlp": False}, LEARNED),
        *({"parallel_block": True}, {"layers_without_rope": frozenset({0})}, {"attention_sinks": True}),
        *({"attention_softcap": 50.0}, {"qkv_clip": 8.0}, {"qk_norm": QkNorm.WHOLE}, {"residual_scale": 0.2}),
    ]
    for changes in others:
        assert not replace(BODY, **changes).plain_layers, changes
