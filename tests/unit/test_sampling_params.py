"""Values of SamplingParams and SpeculationParams: one line for each wrong one, except for forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specinfer import SamplingParams
from specinfer.errors import RequestError
from specinfer.sampling_params import SpeculationParams
from specinfer.tree.token_tree import Expansion

PENALTY = "a number in [-2, 2]; 0 switches it off"
REPETITION = "a number in [0.001, 1000]; 1 switches it off"
BIASES = "token ids, each with a number in [-100, 100]"
REPORTS = "an integer in [0, 1000], or None for none"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature is -0.1; allowed: a finite number >= 0"),
    ({"temperature": float("nan")}, "temperature is nan; allowed: a finite number >= 0"),
    ({"temperature": True}, "temperature is True; allowed: a finite number >= 0"),
    ({"temperature": "hot"}, "temperature is 'hot'; allowed: a finite number >= 0"),
    ({"top_p": 0}, "top_p is 0; allowed: a number in (0, 1]; 1 keeps every token"),
    ({"top_p": 1.1}, "top_p is 1.1; allowed: a number in (0, 1]; 1 keeps every token"),
    ({"min_p": -1}, "min_p is -1; allowed: a number in [0, 1]; 0 keeps every token"),
    ({"top_k": -1}, "top_k is -1; allowed: an integer >= 0; 0 keeps every token"),
    ({"top_k": 2.0}, "top_k is 2.0; allowed: an integer >= 0; 0 keeps every token"),
    ({"seed": 1 << 64}, f"seed is {1 << 64}; allowed: an integer in [-2**63, 2**64)"),
    ({"max_tokens": -1}, "max_tokens is -1; allowed: an integer >= 0"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1; allowed: True or False"),
    ({"min_tokens": -1}, "min_tokens is -1; allowed: an integer >= 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; allowed: at most max_tokens (8); lower it"),
    ({"stop": [""]}, "stop has ''; allowed: non-empty strings"),
    ({"stop": 3}, "stop is 3; allowed: non-empty strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids has -1; allowed: token ids >= 0"),
    ({"stop_token_ids": [True]}, "stop_token_ids has True; allowed: token ids >= 0"),
    ({"ignore_eos": "no"}, "ignore_eos is 'no'; allowed: True or False"),
    ({"presence_penalty": 2.1}, f"presence_penalty is 2.1; allowed: {PENALTY}"),
    ({"frequency_penalty": -3}, f"frequency_penalty is -3; allowed: {PENALTY}"),
    ({"repetition_penalty": 0}, f"repetition_penalty is 0; allowed: {REPETITION}"),
    ({"repetition_penalty": 1e-300}, f"repetition_penalty is 1e-300; allowed: {REPETITION}"),
    ({"repetition_penalty": 10**4}, f"repetition_penalty is 10000; allowed: {REPETITION}"),
    ({"temperature": 10**400}, f"temperature is 1{'0' * 400}; allowed: a finite number >= 0"),
    ({"logit_bias": [(1, 2)]}, f"logit_bias is [(1, 2)]; allowed: a mapping of {BIASES}"),
    ({"logit_bias": {"one": 1}}, f"logit_bias has the key 'one'; allowed: {BIASES}"),
    ({"logit_bias": {1.0: 1}}, f"logit_bias has the key 1.0; allowed: {BIASES}"),
    ({"logit_bias": {7: float("nan")}}, f"logit_bias of token 7 is nan; allowed: {BIASES}"),
    ({"logit_bias": {7: 100.5}}, f"logit_bias of token 7 is 100.5; allowed: {BIASES}"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has the key '999"),
    ({"logit_bias": {"7": 1, 7: 2}}, "logit_bias has token 7 twice; remove one of them"),
    ({"bad_words": [""]}, "bad_words has ''; allowed: non-empty strings"),
    ({"bad_words": ["a", "  "]}, "bad_words has '  '; allowed: strings that are not blank"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty; allowed: at least one token id, or None"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids is '12'; allowed: token ids >= 0"),
    ({"choice": "yes"}, "choice is 'yes'; allowed: a list of one or more non-empty strings"),
    ({"n": np.bool_(True)}, "n is np.True_; allowed: an integer in [1, 1024]"),
    ({"top_p": np.float32("nan")}, "top_p is np.float32(nan); allowed: a number in (0, 1]"),
    ({"n": 0}, "n is 0; allowed: an integer in [1, 1024]"),
    ({"n": 1025}, "n is 1025; allowed: an integer in [1, 1024]"),
    (
        {"best_of": 3},
        "best_of is 3; it is not supported: set n and logprobs, and choose the best completion by its "
        "log-probabilities",
    ),
    ({"logprobs": -1}, f"logprobs is -1; allowed: {REPORTS}"),
    ({"prompt_logprobs": 1001}, f"prompt_logprobs is 1001; allowed: {REPORTS}"),
    ({"logprobs_mode": "both"}, "logprobs_mode is 'both'; allowed: raw, processed"),
    (
        {"choice": ["a"], "ignore_eos": True},
        "ignore_eos is True with choice, whose form ends the text; remove one of them",
    ),
    ({"cache_pins": [(1, 2, 3)]}, "cache_pins is ((1, 2, 3),); allowed: at most 4 pairs"),
    ({"cache_pins": ["ab"]}, "cache_pins is ('ab',); allowed: at most 4 pairs of a number of tokens"),
    ({"cache_salt": ""}, "cache_salt is ''; allowed: a string of 1 to 1024 characters, or None"),
    ({"cache_salt": "x" * 1025}, "cache_salt is a string of 1025 characters; allowed: a string of 1 to"),
    ({"prediction": [1, "a"]}, "prediction has 'a'; allowed: token ids >= 0"),
]


def test_what_is_kept_of_a_value() -> None:
    for given, name, kept in (
        ({"logit_bias": {"5": 1, 6: -100}}, "logit_bias", {5: 1.0, 6: -100.0}),  # JSON's keys are strings
        ({"logit_bias": {}}, "logit_bias", {}),
        ({"bad_words": "one"}, "bad_words", ("one",)),
        ({"bad_words": [" a", "b"]}, "bad_words", (" a", "b")),
        ({"allowed_token_ids": {3}}, "allowed_token_ids", (3,)),
        ({"choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"prediction": [1, 2]}, "prediction", (1, 2)),
        ({"prediction": "text"}, "prediction", "text"),
        ({"speculation": None}, "speculation", SpeculationParams()),
        ({"speculation": False}, "speculation", SpeculationParams(enabled=False)),
        ({"repetition_penalty": 0.001}, "repetition_penalty", 0.001),
        ({"repetition_penalty": 1000}, "repetition_penalty", 1000),
        ({"presence_penalty": -2}, "presence_penalty", -2),
        ({"logprobs": 0, "prompt_logprobs": 1000}, "prompt_logprobs", 1000),
        ({"response_format": {"type": "text"}, "ignore_eos": True}, "structured_output", None),
    ):
        assert getattr(SamplingParams(**given), name) == kept, given


def test_the_callers_own_mapping_and_lists_are_not_kept() -> None:
    biases, allowed = {1: 1.0}, [1]
    params = SamplingParams(logit_bias=biases, allowed_token_ids=allowed)  # type: ignore[arg-type]
    biases[2] = float("nan")
    allowed.append(-1)
    assert (params.logit_bias, params.allowed_token_ids) == ({1: 1.0}, (1,))


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_the_edges_of_the_ranges_are_in() -> None:
    params = SamplingParams(
        temperature=0, top_k=0, top_p=1, min_p=1, seed=(1 << 63) - 1, max_tokens=1, min_tokens=1
    )
    assert params.greedy
    assert SamplingParams(seed=0, min_p=0, top_p=1e-9).seed == 0


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1, False)])
def test_temperatures_next_to_zero_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_every_way_to_say_it() -> None:
    for given, meant in (
        (None, SpeculationParams()),
        (False, SpeculationParams(enabled=False)),
        ({"max_nodes": 1}, SpeculationParams(max_nodes=1)),
        ({"expansion": "2,1"}, SpeculationParams(expansion=Expansion((2, 1)))),
        ({"expansion": "<1,1,3>"}, SpeculationParams(expansion=Expansion((1, 1, 3)))),
        ({"expansion": [2, 1]}, SpeculationParams(expansion=Expansion((2, 1)))),
        ({"speculators": "lookup"}, SpeculationParams(speculators=("lookup",))),
        ({"verifier": "mss"}, SpeculationParams(verifier="mss")),
        (SpeculationParams(max_nodes=3), SpeculationParams(max_nodes=3)),
    ):
        assert SpeculationParams.of(given) == meant, given


SPECULATORS = "allowed: names of speculators, at least one; to switch speculation off, set enabled to false"


WRONG_WISHES: list[tuple[Any, str]] = [
    (
        "on",
        "speculation is 'on'; allowed: true, false, or a mapping of enabled, max_nodes, expansion, "
        "speculators, verifier",
    ),
    (
        {"nodes": 3},
        "speculation has no option 'nodes'; allowed: enabled, max_nodes, expansion, speculators, verifier",
    ),
    ({"enabled": "no"}, "speculation.enabled is 'no'; allowed: true or false"),
    ({"max_nodes": 0}, "speculation.max_nodes is 0; allowed: an integer >= 1, the root included"),
    ({"expansion": "1,x"}, "speculation.expansion is '1,x'; allowed: integers >= 1"),
    ({"expansion": [0]}, "speculation.expansion is '0'; allowed: "),
    ({"speculators": []}, f"speculation.speculators is []; {SPECULATORS}"),
    ({"speculators": [1]}, f"speculation.speculators is [1]; {SPECULATORS}"),
    ({"verifier": "naive"}, "speculation.verifier is 'naive'; allowed: coupled, mss"),
]


def test_a_wrong_value_is_one_line() -> None:
    cases = [(SamplingParams, values, line) for values, line in WRONG]
    wishes = [(SpeculationParams.of, {"value": given}, line) for given, line in WRONG_WISHES]
    for make, values, line in (*cases, *wishes):
        with pytest.raises(RequestError) as caught:
            pytest.fail(f"{values}: {make(**values)}")
        assert str(caught.value).startswith(line)


def test_wishes_are_frozen_and_hashable() -> None:
    wishes: Any = SpeculationParams.of({"speculators": ["a"], "expansion": [1]})
    assert hash(wishes) == hash(SpeculationParams(speculators=("a",), expansion=Expansion((1,))))
