"""Cost models follow the times of passes, and ignore interruptions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel

CURVE = CostCurve((1, 4, 16, 64), (5.0, 5.5, 9.0, 25.0))
Truth = Callable[[int, int, float], float]  # seconds of a pass: by its number, its rows and its context


def at(rows: int) -> float:
    return float(CURVE.seconds([rows])[0])


def taught(
    truth: Truth,
    passes: int = 600,
    *,
    rows: tuple[int, ...] = (1, 8, 12, 16),
    context: Callable[[int], float] = lambda number: 300,
    noise: float = 0.05,
    interrupted: float = 0.03,
) -> CostModel:
    """A model after passes, some of them interrupted for a hundred times as long."""
    model, chance = CostModel(CURVE), random.Random(1)
    for number in range(passes):
        size, there = chance.choice(rows), context(number)
        model.begin(there)
        seconds = truth(number, size, there) * chance.lognormvariate(0, noise)
        model.learn(size, seconds * (100 if chance.random() < interrupted else 1))
    return model


TRUTHS: dict[str, tuple[Truth, float]] = {  # and the allowed error of a pass
    "as measured": (lambda number, rows, context: at(rows), 0.03),
    "twice as slow": (lambda number, rows, context: 2 * at(rows), 0.05),
    "half as slow": (lambda number, rows, context: at(rows) / 2, 0.05),
    "slower by and by": (lambda number, rows, context: at(rows) * (1 + number / 600), 0.05),
    "slow in between": (lambda number, rows, context: at(rows) * (2 if 200 < number < 400 else 1), 0.08),
    "slow at last": (lambda number, rows, context: at(rows) * (2.5 if number > 540 else 1), 0.15),
    "python around it": (lambda number, rows, context: at(rows) + 2, 0.06),
    "python for each row": (lambda number, rows, context: at(rows) + 0.2 * rows, 0.06),
    "four times too quick a curve": (lambda number, rows, context: 4 * at(rows), 0.08),
    "four times too slow a curve": (lambda number, rows, context: at(rows) / 4, 0.21),  # 0.3 is the least
    "rows are dear": (lambda number, rows, context: 5 * (1 + rows / 8), 0.1),
    "rows are free": (lambda number, rows, context: 5, 0.25),
}


@pytest.mark.parametrize("truth", TRUTHS)
def test_seconds_become_those_that_passes_take(truth: str) -> None:
    takes, bound = TRUTHS[truth]
    model = taught(takes)
    thought = model.seconds([1, 8, 16])
    wanted = [takes(600, rows, 300) for rows in (1, 8, 16)]
    np.testing.assert_allclose(thought, wanted, rtol=bound)


def test_a_machine_that_becomes_slow_is_noticed_within_a_dozen_passes() -> None:
    model = taught(lambda number, rows, context: at(rows), rows=(8,), interrupted=0)
    for _ in range(12):
        model.learn(8, 2 * at(8))
    assert model.seconds([8])[0] == pytest.approx(2 * at(8), rel=0.1)
    assert model.factor == pytest.approx(2, rel=0.15)


def test_what_is_no_time_of_a_pass_teaches_nothing() -> None:
    model = CostModel(CURVE)
    for seconds in 100 * (math.nan, math.inf, -math.inf, 0.0, -1.0):
        model.learn(8, seconds)
        model.learn(0, 1.0)
    np.testing.assert_array_equal(model.seconds(range(70)), CURVE.seconds(range(70)))


@pytest.mark.parametrize("seconds", [1e-300, 1e300])
def test_absurd_times_leave_costs_within_bounds(seconds: float) -> None:
    model = CostModel(CURVE)
    for number in range(1000):
        model.begin(float(number))
        model.learn(1 + number % 16, seconds)
        thought = model.seconds([0, 1, 16, 64])
        assert thought[0] == 0
        assert all(
            0.29 * at(rows) <= there < 200 * at(rows)
            for rows, there in zip((1, 16, 64), thought[1:], strict=True)
        )


def test_no_clock_has_a_say_where_costs_are_the_curves() -> None:
    model = CostModel(CURVE, learns=False)
    for number in range(100):
        model.begin(float(number))
        model.learn(8, 100.0)
    rows = np.arange(200)
    np.testing.assert_array_equal(model.seconds(rows), CURVE.seconds(rows))
    assert model.factor == 1


def test_more_rows_never_take_less_and_none_take_nothing() -> None:
    for truth, _ in TRUTHS.values():
        thought = taught(truth, 100).seconds(np.arange(300))
        assert thought[0] == 0
        assert (np.diff(thought) >= 0).all()
