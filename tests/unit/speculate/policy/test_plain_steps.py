"""Cost of steps without guesses, from few of them."""

from __future__ import annotations

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
