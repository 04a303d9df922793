"""Log-probabilities that are reported: of the model's law, of the law tokens are chosen from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer import SamplingParams
from specinfer.verify.logprobs import processed_logprobs, raw_logprobs, report
from tests.exact.oracles import processed_law
from tests.exact.slow_sampling import logprobs


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def text_of(self, token_id: int) -> str:
        return chr(ord("a") + token_id)


def told(row: list[float], chosen: int, top: int) -> list[tuple[int, float, int, str]]:
    found = report(np.array(row), chosen, top, Letters())  # type: ignore[arg-type]
    return [(token, entry.logprob, entry.rank, entry.text) for token, entry in found.items()]


ROW = [-1.5, -0.7, -math.inf, -1.5, -2.5]


@pytest.mark.parametrize(
    ("chosen", "top", "expected"),
    [
        (1, 0, [(1, -0.7, 1, "b")]),
        (4, 0, [(4, -2.5, 4, "e")]),
        (1, 1, [(1, -0.7, 1, "b")]),  # the chosen one is the likeliest: named once
        # The chosen one first; equal ones have one rank, the lowest id first.
        (4, 2, [(4, -2.5, 4, "e"), (1, -0.7, 1, "b"), (0, -1.5, 2, "a")]),
        (3, 3, [(3, -1.5, 2, "d"), (1, -0.7, 1, "b"), (0, -1.5, 2, "a")]),
        # A token the law excludes is not among the likeliest, however many are asked for.
        (0, 99, [(0, -1.5, 2, "a"), (1, -0.7, 1, "b"), (3, -1.5, 2, "d"), (4, -2.5, 4, "e")]),
        (2, 1, [(2, -math.inf, 5, "c"), (1, -0.7, 1, "b")]),
    ],
)
def test_the_chosen_token_and_the_likeliest(
    chosen: int, top: int, expected: list[tuple[int, float, int, str]]
) -> None:
    assert told(ROW, chosen, top) == expected


def test_figures_closer_than_float32_keep_their_order() -> None:
    row = [-20.0, -20.0 + 1e-9, -20.0 + 2e-9, -0.1]
    assert [token for token, *_ in told(row, 3, 4)] == [3, 2, 1, 0]
    assert [rank for *_, rank, _ in told(row, 3, 4)] == [1, 2, 3, 4]


@given(
    row=st.lists(st.sampled_from([-math.inf, -3.0, -2.0, -1.0, -0.5]), min_size=1, max_size=12),
    top=st.integers(0, 14),
)
def test_the_likeliest_are_those_of_a_full_sort(row: list[float], top: int) -> None:
    order = [i for i in sorted(range(len(row)), key=lambda i: (-row[i], i)) if row[i] > -math.inf]
    assert [token for token, *_ in told(row, 0, top)] == list(dict.fromkeys([0, *order[:top]]))


LOGITS = np.array([3.0, 1.0, 0.0, -1.0, -np.inf, 700.0, 699.0], dtype=np.float32)


def test_raw_ones_are_the_log_softmax() -> None:
    found = raw_logprobs(LOGITS)
    assert found.tolist() == pytest.approx(logprobs(LOGITS.tolist()), abs=1e-12)
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5, "temperature": 3}],
)
def test_processed_ones_are_those_of_the_law_tokens_are_chosen_from(params: dict[str, Any]) -> None:
    logits, asked = LOGITS[:5], SamplingParams(**params)
    expected = [math.log(p) if p > 0 else -math.inf for p in processed_law(logits, asked)]
    assert processed_logprobs(logits, asked).tolist() == pytest.approx(expected, abs=1e-9)


def test_greedy_ones_are_taken_at_temperature_one() -> None:
    greedy = SamplingParams(temperature=0, top_k=1)
    assert processed_logprobs(LOGITS, greedy).tolist() == raw_logprobs(LOGITS).tolist()
