"""Counts or a logistic: whichever was right of late says how likely a guess is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.features import NAMES
from specinfer.speculate.policy.logistic import HEAVIEST
from specinfer.tree import Draw, DrawRule

NAN, INF = math.nan, math.inf


def draw(node: int, speculator: str = "s", confidence: float = 0.5, *evidence: float) -> Draw:
    return Draw(0, node, speculator, DrawRule.POINT_MASS, None, confidence, evidence)


def loss(rate: float, became: bool) -> float:
    return -math.log(rate if became else 1 - rate)


Makes = Callable[[random.Random], tuple[list[Draw], int]]  # draws below a node, and the one that is right


def taught(estimator: Estimator, outcomes: int, makes: Makes) -> float:
    """The mean log-loss of an estimator's rates along outcomes, each of them learnt from."""
    luck, total, draws = random.Random(1), 0.0, 0
    for _ in range(outcomes):
        below, accepted = makes(luck)
        for one, rate in zip(below, estimator.rates(below, 0.0), strict=True):
            total, draws = total + loss(rate, one.node == accepted), draws + 1
        estimator.learn(below, accepted, 0.0)
    return total / draws


def agreeing(luck: random.Random) -> tuple[list[Draw], int]:
    """Two that are right where they agree, and as sure of themselves where they do not."""
    agree = luck.random() < 0.5
    below = [draw(1, "a", 0.7, 4.0), draw(1 if agree else 2, "b", 0.7, 4.0)]
    if luck.random() < 0.05:
        agree = not agree
    return below, 1 if agree else 9


def test_a_logistic_knows_what_counts_cannot() -> None:
    counts, both = Estimator(logistics=False), Estimator()
    assert taught(both, 600, agreeing) < 0.6 * taught(counts, 600, agreeing)
    agree = both.rates([draw(1, "a", 0.7, 4.0), draw(1, "b", 0.7, 4.0)], 0.0)
    differ = both.rates([draw(1, "a", 0.7, 4.0), draw(2, "b", 0.7, 4.0)], 0.0)
    assert min(agree) > 0.7
    assert max(differ) < 0.3


def test_where_counts_know_better_they_are_asked() -> None:
    """Of one speculator: what it says of itself is worth nothing in order, so no line fits."""

    def odd(luck: random.Random) -> tuple[list[Draw], int]:
        sure = luck.choice([0.1, 0.5, 0.9])
        return [draw(1, "s", sure)], 1 if sure == 0.5 else 9

    counts, both = Estimator(logistics=False), Estimator()
    alone = taught(counts, 1500, odd)
    assert taught(both, 1500, odd) < alone + 0.03
    assert both.rivals["s"].lead < 0
    for sure in (0.1, 0.5, 0.9):
        assert both.rates([draw(1, "s", sure)], 0.0) == counts.rates([draw(1, "s", sure)], 0.0)


def test_one_speculator_says_nothing_of_another() -> None:
    estimator = Estimator()
    before = estimator.rates([draw(1, "other", 0.7)], 0.0)
    for _ in range(200):
        estimator.learn([draw(1, "s", 0.7)], 9, 0.0)
    assert estimator.rates([draw(1, "other", 0.7)], 0.0) == before


@pytest.mark.parametrize("evidence", [(), (3.0,), (0.6, 0.3), (3.0, 2.0, 0.8)])
def test_a_speculator_that_always_or_never_hits_is_soon_known(evidence: tuple[float, ...]) -> None:
    for hits in (True, False):
        estimator = Estimator()
        for _ in range(80):
            estimator.learn([draw(1, "s", 0.7, *evidence)], 1 if hits else 9, 0.0)
        [rate] = estimator.rates([draw(1, "s", 0.7, *evidence)], 0.0)
        assert rate > 0.85 if hits else rate < 0.15


@pytest.mark.parametrize("evidence", [(), (3.0,), (0.6, 0.3), (3.0, 2.0, 0.8)])
def test_a_speculator_that_suddenly_hits_is_believed_again(evidence: tuple[float, ...]) -> None:
    estimator = Estimator()
    for accepted in (9, 1, 9):
        for _ in range(600):
            estimator.learn([draw(1, "s", 0.7, *evidence)], accepted, 0.0)
        [rate] = estimator.rates([draw(1, "s", 0.7, *evidence)], 0.0)
        assert rate > 0.9 if accepted == 1 else rate < 0.1
    for _ in range(100):  # some guesses later
        estimator.learn([draw(1, "s", 0.7, *evidence)], 1, 0.0)
    assert estimator.rates([draw(1, "s", 0.7, *evidence)], 0.0)[0] > 0.35


@pytest.mark.parametrize("confidence", [NAN, INF, -INF, -3.0, 0.0, 0.5, 1.0, 7.0, 1e300])
@pytest.mark.parametrize("evidence", [(), (NAN,), (INF, INF), (NAN, 0.5), (1.0, NAN, INF), (0.1,) * 9])
def test_a_confidence_that_says_nothing_is_learnt_from_all_the_same(
    confidence: float, evidence: tuple[float, ...]
) -> None:
    """NaN, infinite, over 1 or the same for every guess: right two times of three is what is expected."""
    estimator, luck = Estimator(), random.Random(2)
    for _ in range(1500):
        below = [draw(1, "s", confidence, *evidence), draw(2, "t", 0.6, 2.0)]
        rates = estimator.rates(below, 0.0)
        assert all(0 < rate < 1 for rate in rates)
        estimator.learn(below, 1 if luck.random() < 2 / 3 else 2, 0.0)
    assert estimator.rates([draw(1, "s", confidence, *evidence), draw(2, "t", 0.6, 2.0)], 0.0) == [
        pytest.approx(2 / 3, abs=0.2),
        pytest.approx(1 / 3, abs=0.2),
    ]
    told = estimator.to_json()["logistics"]["s"]
    assert all(abs(weight) <= HEAVIEST for weight in told["weights"].values())


def test_a_rate_that_counts_think_certain_can_be_wrong() -> None:
    estimator = Estimator()
    for _ in range(20_000):  # the counts' rate is 1 to the last bit
        estimator.learn([draw(1, "s", 0.7)], 1, 0.0)
    estimator.learn([draw(1, "s", 0.7)], 9, 0.0)
    assert 0.9 < estimator.rates([draw(1, "s", 0.7)], 0.0)[0] < 1


def test_what_it_has_learnt_can_be_taken_over() -> None:
    first, second = Estimator(), Estimator()
    taught(first, 300, agreeing)
    second.recall(first.to_json())
    luck = random.Random(3)
    for _ in range(50):
        below, accepted = agreeing(luck)
        assert first.rates(below, 0.5) == second.rates(below, 0.5)
        first.learn(below, accepted, 0.5)
        second.learn(below, accepted, 0.5)
    assert second.outcomes == first.outcomes == 2 * 350


def test_weights_are_told_by_name() -> None:
    estimator = Estimator()
    estimator.learn([draw(1, "s", 0.5, 2.0)], 1, 0.0)
    assert list(estimator.to_json()["logistics"]["s"]["weights"]) == list(NAMES)
