"""Engine options: where each goes, and one line for each that is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError
from specinfer.scheduler_config import CacheConfig, SchedulerConfig
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig
from specinfer.tree.draw import PAIRS, DrawRule
from specinfer.tree.token_tree import Expansion


def test_lookups_are_on_by_default_and_can_be_switched_off() -> None:
    config = EngineConfig.from_options("some-model", {})
    assert config == EngineConfig(model="some-model")
    assert config.speculation.enabled
    assert config.speculation.lookup == "auto"
    assert config.with_options({"drafts": "a"}).speculation.lookup
    assert not config.with_options({"lookup": False}).speculation.enabled
    assert not NO_SPECULATION.enabled


def test_flat_options_find_their_groups() -> None:
    options = {
        "device": "cpu",
        "dtype": "float32",
        "drafts": ["a", "b"],
        "expansion": (2, 2),
        "lookup": True,
        "kv_cache_memory": 1 << 20,
        "block_size": 8,
        "max_batch_size": 4,
    }
    assert EngineConfig.from_options("m", options) == EngineConfig(
        model="m",
        device="cpu",
        dtype="float32",
        speculation=SpeculationConfig(drafts=("a", "b"), expansion=Expansion((2, 2)), lookup=True),
        cache=CacheConfig(memory=1 << 20, block_size=8),
        scheduler=SchedulerConfig(max_batch_size=4),
    )


def test_guesses_are_deeper_where_layers_are_streamed_unless_somebody_says_how_deep() -> None:
    options = {"lookup_nodes": 9}
    config = EngineConfig.from_options("m", options).streamed
    meant = {"max_nodes": "auto", "lookup_depth": 48, "max_step_tokens": "auto"}
    assert config == EngineConfig.from_options("m", {**options, **meant})


def test_a_shape_is_learned_where_costs_are_weighed_and_nobody_gives_one() -> None:
    for options, shape in (
        ({}, "learned"),
        ({"expansion": "learned"}, "learned"),
        ({"tree_size": "fixed"}, "1,1,3,1,1"),
        ({"expansion": "2,1"}, "2,1"),
        ({"expansion": "2,1", "tree_size": "fixed"}, "2,1"),
    ):
        speculation = EngineConfig.from_options("m", options).speculation
        assert (speculation.shape, speculation.learns_shape) == (shape, shape == "learned"), options
        assert speculation.with_tree_size("cost").shape == ("2,1" if shape == "2,1" else "learned"), options
        assert speculation.with_tree_size("fixed").shape == ("1,1,3,1,1" if shape == "learned" else shape)


def test_a_config_is_frozen() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "another"  # type: ignore[misc]


def test_an_unknown_option_is_refused_with_a_hint() -> None:
    for option, hint in (
        ("draft", "did you mean drafts?"),
        ("model", "known: block_size, chat_template, "),  # given by position
        ("speculation", "known: block_size, chat_template, "),  # groups are flat here
    ):
        with pytest.raises(ConfigError) as refused:
            pytest.fail(f"{option}: {EngineConfig.from_options('m', {option: 1})}")
        line = str(refused.value)
        assert line.startswith(f"unknown option {option!r}; "), option
        if hint.startswith("did"):
            assert line.endswith(hint), option
        else:
            assert "; known: block_size, chat_template, " in line or "; did you mean" in line, option
        assert "\n" not in line, option


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'; allowed: auto, bfloat16, float32"),
        ({"draft_quantization": None}, "draft_quantization is None; allowed: auto, none, int8, int4, gguf"),
        ({"device": 0}, "device is 0; allowed: auto, cpu, cuda, cuda:N"),
        ({"threads": 0}, "threads is 0; allowed: an integer >= 1"),
        (
            {"draw": "iid"},
            "draw is 'iid' with the coupled verifier; allowed there: coupled, top_k, "
            "as other draws would change the distribution of the text",
        ),
        (
            {"draw": "coupled", "verifier": "mss"},
            "draw is 'coupled' with the mss verifier; allowed there: without_replacement, iid, top_k, "
            "as other draws would change the distribution of the text",
        ),
        ({"draw": ["iid"]}, "draw is ['iid']; allowed: coupled, top_k, iid, without_replacement"),
        ({"drafts": 3}, "drafts is 3; allowed: model names, each a non-empty string"),
        ({"drafts": ["a", ""]}, "drafts is ['a', '']; allowed: model names, each a non-empty string"),
        ({"lookup": "yes"}, "lookup is 'yes'; allowed: True, False or 'auto'"),
        ({"lookup_min": 33}, "lookup_min is 33; allowed: 1 to 32 tokens"),
        ({"lookup_nodes": 1}, "lookup_nodes is 1; allowed: an integer >= 2"),
        (
            {"lookup_memory": 200_000},
            "lookup_memory is 200000; allowed: 0, or 1048576 bytes and more; "
            "200000 tokens take about 12800000 bytes",
        ),
        ({"max_nodes": 0}, "max_nodes is 0; allowed: an integer >= 1, or auto"),
        ({"max_nodes": "all"}, "max_nodes is 'all'; allowed: an integer >= 1, or auto"),
        ({"expansion": 3}, "expansion is 3; allowed: integers >= 1, for example 1,1,3,1,1; or learned"),
        (
            {"expansion": "learned", "tree_size": "fixed"},
            "expansion is 'learned' with tree_size 'fixed'; allowed there: widths, for example "
            "1,1,3,1,1, as a learned shape needs costs; set widths, or leave one option out",
        ),
        (
            {"expansion": ()},
            "expansion is ''; allowed: 1 to 64 integers from 1 to 64, for example 1,1,3,1,1; or learned",
        ),
        ({"max_batch_size": None}, "max_batch_size is None; allowed: an integer >= 1"),
        ({"max_context": 1}, "max_context is 1; allowed: an integer >= 2"),
        (
            {"max_step_tokens": 3, "max_batch_size": 4},
            "max_step_tokens is 3; allowed: 4 (max_batch_size) or more, as every request needs a row; "
            "raise it",
        ),
    ],
)
def test_a_bad_value_gives_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_options("m", options)
    assert str(refused.value) == line


def test_every_draw_a_config_offers_is_one_its_verifier_takes() -> None:
    assert all(set(pairs.draws.values()) <= pairs.accepted for pairs in PAIRS.values())
    assert SpeculationConfig().draw_rule is DrawRule.COUPLED
    assert SpeculationConfig(verifier="mss").draw_rule is DrawRule.WITHOUT_REPLACEMENT
    assert SpeculationConfig(verifier="mss", draw="iid").draw_rule is DrawRule.IID
    assert SpeculationConfig(draw="top_k").draw_rule is DrawRule.POINT_MASS
