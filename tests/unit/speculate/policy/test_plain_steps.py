"""Cost of steps without guesses, from few of them."""

from __future__ import annotations

import math

import pytest

from specinfer.speculate.policy.guard import PlainSteps


def test_the_first_steps_are_plain_and_then_one_in_two_hundred() -> None:
    steps, plain = PlainSteps(), []
    for number in range(500):
        if steps.due(1.0):
            plain.append(number)
            steps.learn(1.0, 1.5)
        else:
            steps.since += 1
    assert plain == [0, 1, 2, 3, 4, 205, 406]


def test_the_median_of_the_last_five_counts() -> None:
    steps = PlainSteps()
    for multiple in (9.0, 1.2, 1.1, 1.3, 900.0):
        steps.learn(1.0, multiple)
    assert steps.look_up(1.0).multiple == 1.3
    for _ in range(5):
        steps.learn(1.0, 0.7)
    assert steps.look_up(1.0).multiple == 0.7


@pytest.mark.parametrize("multiple", [math.nan, math.inf, 0.0, -1.0])
def test_a_step_whose_time_is_no_use_counts_and_teaches_nothing(multiple: float) -> None:
    steps = PlainSteps()
    for _ in range(5):
        assert steps.due(1.0)
        steps.learn(1.0, multiple)
    assert not steps.due(1.0), "a broken clock does not keep everybody from guessing"
    assert not steps.seen


def test_where_passes_seem_to_have_changed_there_are_a_few_more() -> None:
    steps, plain = PlainSteps(), []
    for number in range(300):
        slowness = 1.0 if number < 100 else 1.5
        if steps.due(slowness):
            plain.append(number)
            steps.learn(slowness, 1.2 if number < 100 else 0.8)
            multiples = steps.look_up(slowness).multiple
            assert multiples == (1.2 if number < 100 else 0.8), "the least it may be, until there are enough"
        else:
            steps.since += 1
    assert plain == [0, 1, 2, 3, 4, 100, 109, 118]
    assert steps.look_up(1.5).multiple == 0.8
