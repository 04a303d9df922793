"""A logistic that learns one guess after the other."""

from __future__ import annotations

import math
import random

import pytest

from specinfer.speculate.policy.features import NAMES, Features
from specinfer.speculate.policy.logistic import HEAVIEST, UNSURE, Logistic

NOTHING: Features = (0.0,) * 9
BELIEVES: Features = (0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def features(sureness: float = 0.0, agreed: float = 0.0) -> Features:
    return (1.0, sureness, 0.0, 0.0, 0.0, agreed, 0.0, 0.0, 0.0)


def test_weights_make_log_odds() -> None:
    assert Logistic(NOTHING).probability(features(1.0)) == 0.5
    assert Logistic(BELIEVES).probability(features(0.25)) == pytest.approx(1 / (1 + math.exp(-1)))


def test_nothing_is_certain() -> None:
    heavy: Features = (HEAVIEST,) * 9
    light: Features = (-HEAVIEST,) * 9
    most: Features = (1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert Logistic(heavy).probability(most) == 1 - UNSURE
    assert Logistic(light).probability(most) == UNSURE


def test_it_learns_what_a_feature_is_worth() -> None:
    logistic, luck = Logistic(NOTHING), random.Random(0)
    for _ in range(4000):
        agreed = float(luck.random() < 0.5)
        known = features(0.0, agreed)
        logistic.learn(known, logistic.probability(known), luck.random() < (0.9 if agreed else 0.2))
    assert logistic.probability(features(0.0, 1.0)) == pytest.approx(0.9, abs=0.1)
    assert logistic.probability(features(0.0, 0.0)) == pytest.approx(0.2, abs=0.1)
    assert logistic.weights[NAMES.index("support")] == 0  # it was never there


def test_weights_stay_within_bounds() -> None:
    logistic = Logistic(NOTHING)
    for _ in range(10_000):
        logistic.learn(
            (1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0), 0.0, True
        )  # whatever it says, it was wrong
    assert logistic.weights == (HEAVIEST,) * 9


def test_weights_have_names() -> None:
    logistic = Logistic.from_named({name: float(number) for number, name in enumerate(NAMES)})
    assert logistic.weights == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert Logistic.from_named(logistic.named()) == logistic


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e300, 16.5, "1", None, True])
def test_a_weight_that_cannot_be_is_refused(weight: object) -> None:
    with pytest.raises(ValueError, match="stands where"):
        Logistic.from_named({**dict.fromkeys(NAMES, 0.0), "agreed": weight})


def test_weights_of_other_features_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of one, colour"):
        Logistic.from_named({"one": 0.0, "colour": 1.0})
