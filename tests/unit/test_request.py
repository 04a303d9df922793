"""Sampling parameters: their ranges, one line for each that is wrong; figures that add up."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.errors import RequestError
from specinfer.request import SpeculationFigures
from specinfer.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; allowed: a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature is nan; allowed: a finite number >= 0"),
        ({"temperature": float("inf")}, "temperature is inf; allowed: a finite number >= 0"),
        ({"temperature": True}, "temperature is True; allowed: a finite number >= 0"),
        ({"temperature": "hot"}, "temperature is 'hot'; allowed: a finite number >= 0"),
        ({"temperature": None}, "temperature is None; allowed: a finite number >= 0"),
        ({"top_p": 0}, "top_p is 0; allowed: a number in (0, 1]; 1 keeps every token"),
        ({"top_p": 1.1}, "top_p is 1.1; allowed: a number in (0, 1]; 1 keeps every token"),
        ({"top_p": "0.9"}, "top_p is '0.9'; allowed: a number in (0, 1]; 1 keeps every token"),
        ({"min_p": -1}, "min_p is -1; allowed: a number in [0, 1]; 0 keeps every token"),
        ({"min_p": []}, "min_p is []; allowed: a number in [0, 1]; 0 keeps every token"),
        ({"top_k": -1}, "top_k is -1; allowed: an integer >= 0; 0 keeps every token"),
        ({"top_k": 2.0}, "top_k is 2.0; allowed: an integer >= 0; 0 keeps every token"),
        ({"top_k": "5"}, "top_k is '5'; allowed: an integer >= 0; 0 keeps every token"),
        ({"seed": 1 << 64}, f"seed is {1 << 64}; allowed: an integer in [-2**63, 2**64)"),
        ({"seed": "x"}, "seed is 'x'; allowed: an integer in [-2**63, 2**64)"),
        ({"max_tokens": -1}, "max_tokens is -1; allowed: an integer >= 0"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1; allowed: True or False"),
        ({"max_tokens": None}, "max_tokens is None; allowed: an integer >= 0"),
        ({"min_tokens": -1}, "min_tokens is -1; allowed: an integer >= 0"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens is 9; allowed: at most max_tokens (8); lower it",
        ),
        ({"stop": [""]}, "stop has ''; allowed: non-empty strings"),
        ({"stop": ["a", 3]}, "stop has 3; allowed: non-empty strings"),
        ({"stop": 3}, "stop is 3; allowed: non-empty strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids has -1; allowed: token ids >= 0"),
        ({"stop_token_ids": [True]}, "stop_token_ids has True; allowed: token ids >= 0"),
        ({"stop_token_ids": 2}, "stop_token_ids is 2; allowed: token ids >= 0"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; allowed: True or False"),
    ],
)
def test_a_bad_value_gives_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**values)
    assert str(refused.value) == line


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


def test_figures_of_several_requests_add_up() -> None:
    total = SpeculationFigures()
    assert total.tokens_per_step == 0.0
    total.add(
        SpeculationFigures(
            steps=2,
            output_tokens=5,
            drafted_tokens=8,
            accepted_tokens=3,
            accepted_per_depth=[2, 1],
            drafted_per_depth=[2, 2],
            accepted_by={"lookup": 3},
            proposed_by={"lookup": 8},
        )
    )
    total.add(
        SpeculationFigures(
            steps=2,
            output_tokens=3,
            drafted_tokens=5,
            accepted_tokens=1,
            accepted_per_depth=[1],
            drafted_per_depth=[2, 1, 1],
            accepted_by={"draft": 1, "lookup": 1},
            proposed_by={"draft": 5},
        )
    )
    assert total == SpeculationFigures(
        steps=4,
        output_tokens=8,
        drafted_tokens=13,
        accepted_tokens=4,
        accepted_per_depth=[3, 1],
        drafted_per_depth=[4, 3, 1],
        accepted_by={"lookup": 4, "draft": 1},
        proposed_by={"lookup": 8, "draft": 5},
    )
    assert total.tokens_per_step == 2.0
