"""adapter_config.json: settings per module, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specinfer.errors import ModelError
from specinfer.models.adapters.adapter_config import AdapterConfig, adapter_config

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj"


def read(**config: Any) -> AdapterConfig:
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    return adapter_config({**usual, **config})


def test_rank_and_scale_are_those_of_the_first_pattern_that_matches() -> None:
    config = read(
        rank_pattern={"down_proj": 4, r"layers\.1\d?\..*": 2, "q_pro": 1},
        alpha_pattern={"self_attn.q_proj": 4.0},
    )
    assert [config.rank_of(name) for name in (Q, DOWN)] == [8, 4]
    assert [config.scale_of(name) for name in (Q, DOWN)] == [0.5, 4.0]


def test_rslora_divides_by_the_root() -> None:
    assert read(use_rslora=True).scale_of(Q) == 16 / math.sqrt(8)


def test_modules_that_are_adapted() -> None:
    for config, adapted in (
        ({}, [Q]),
        ({"target_modules": "all-linear"}, [Q, DOWN]),
        ({"target_modules": r".*\.(q|down)_proj"}, [Q, DOWN]),
        ({"target_modules": "q_proj"}, []),  # a pattern of the whole name
        ({"target_modules": ["proj"]}, []),
        ({"target_modules": ["mlp.down_proj", "q_proj"], "layers_to_transform": [11]}, [DOWN]),
        ({"target_modules": "all-linear", "layers_to_transform": 0}, [Q]),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, [DOWN]),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"}, [Q]),
    ):
        found = read(**config)
        assert [name for name, layer in ((Q, 0), (DOWN, 11)) if found.adapts(name, layer)] == adapted, config


def test_what_is_refused_is_named() -> None:
    for config, message in (
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: LORA"),
        ({"use_dora": True}, "sets use_dora = True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"sets modules_to_save = \['lm_head'\]"),
        ({"lora_bias": True}, "sets lora_bias = True"),
        ({"bias": "all"}, "bias is 'all'; supported: none"),
        ({"layer_replication": [[0, 4]]}, "sets layer_replication"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "sets target_parameters"),
        ({"alora_invocation_tokens": [1]}, "sets alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "sets trainable_token_indices"),
        ({"use_qalora": True}, "sets use_qalora"),
        ({"something_new": {"a": 1}}, "sets something_new"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes"),
        ({"r": 0}, "r is 0; expected at least 1"),
        ({"r": "8"}, "r is '8'; expected an integer"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; expected a number"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has '\\(', which is not a pattern"),
        ({"rank_pattern": [4]}, "rank_pattern is"),
        ({"target_modules": None}, "target_modules is None; expected names"),
        ({"target_modules": [1]}, r"target_modules is \[1\]; expected names"),
        ({"target_modules": "*q"}, "target_modules has '\\*q', which is not a pattern"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform is"),
        ({"use_rslora": 1}, "use_rslora is 1; expected true or false"),
    ):
        with pytest.raises(ModelError, match=message) as error:
            pytest.fail(f"{config}: {read(**config)}")
        assert "\n" not in str(error.value), config
