"""Confidences of speculators, and the acceptance rates that they had."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specinfer.speculate.policy.acceptance import MAX_LOG_ODDS, AcceptanceRates
from specinfer.speculate.policy.choose import path_probabilities
from specinfer.tree import TokenTree, merge
from tests.unit.speculate.policy.priced import chain


def probabilities(acceptance: AcceptanceRates, tree: TokenTree) -> list[float]:
    return path_probabilities(acceptance.node_rates(tree), tree.parents)


RIGHT, WRONG = (10, 99), (99,)  # texts that go on as a chain's first guess says, or not


def test_results_of_guesses_decide_soon() -> None:
    acceptance = AcceptanceRates()
    for i in range(200):
        acceptance.learn(chain(0.9), RIGHT if i % 5 == 0 else WRONG, 0.0)
    assert probabilities(acceptance, chain(0.9))[1] == pytest.approx(0.2, abs=0.1)
    assert probabilities(acceptance, chain(0.9, speculator="other"))[1] > 0.8  # those of others are theirs
    assert acceptance.outcomes == 200


def test_confidences_that_mean_little_become_a_flat_curve() -> None:
    acceptance, random = AcceptanceRates(), np.random.default_rng(0)
    for sure in random.choice([0.1, 0.5, 0.9], size=3000).tolist():
        acceptance.learn(chain(sure), RIGHT if random.random() < 0.6 else WRONG, 0.0)
    rates = [probabilities(acceptance, chain(sure))[1] for sure in (0.1, 0.5, 0.9)]
    assert rates == pytest.approx([0.6] * 3, abs=0.15)


def test_of_two_that_agree_the_more_hopeful_is_believed() -> None:
    tree = merge([chain(0.5, speculator="a"), chain(0.9, speculator="b")])
    assert tree.num_nodes == 2
    assert probabilities(AcceptanceRates(), tree)[1] == probabilities(AcceptanceRates(), chain(0.9))[1]


@pytest.mark.parametrize(("sure", "sign"), [(1.0, 1), (0.0, -1), (float("nan"), -1), (7.0, 1)])
def test_certainty_is_not_taken_at_its_word(sure: float, sign: int) -> None:
    likely = 1 / (1 + math.exp(-sign * MAX_LOG_ODDS))
    assert probabilities(AcceptanceRates(), chain(sure))[1] == pytest.approx(likely)


@pytest.mark.parametrize("level", range(3))
def test_levels_are_counted_where_all_above_held_the_text(level: int) -> None:
    acceptance = AcceptanceRates({"draft": 3})
    text = (*range(10, 10 + level), 99)
    for _ in range(60):
        acceptance.learn(chain(0.5, 0.5, 0.5, speculator="draft"), text, 0.0)
    rates = [rate.first for rate in acceptance.levels["draft"].rates(0.0)]
    assert [rate > 0.9 for rate in rates[:level]] == [True] * level
    assert rates[level] < 0.1
    assert not acceptance.levels["draft"].counts[0, level + 1 :].any()


def test_a_request_is_known_by_the_results_of_others_at_its_temperature() -> None:
    levels = AcceptanceRates({"draft": 1}).levels["draft"]
    for _ in range(40):
        levels.learn(0, 0, 0.0)
        levels.learn(0, None, 1.5)
    of_all = levels.usual_rates()[0].first
    assert levels.rates(1.2)[0].first < of_all - 0.2 < of_all + 0.2 < levels.rates(0.0)[0].first
    assert levels.rates(0.7)[0].first == of_all, "nothing was seen there"
