"""Cost of steps without guesses, from few of them."""

from __future__ import annotations

from specinfer.speculate.policy.guard import PlainSteps


def test_the_first_steps_are_plain_then_one_in_two_hundred_and_three_after_a_change() -> None:
    steps, plain = PlainSteps(), []
    for number in range(640):
        slowness = 1.0 if number < 500 else 2.0  # than which the multiple becomes another one
        if steps.due(slowness):
            plain.append(number)
            steps.learn(slowness, 1.5 / slowness)
        else:
            steps.since += 1
    assert plain == [0, 1, 2, 3, 4, 205, 406, 500, 509, 518]
    assert [*steps.multiples] == 3 * [0.75]


def test_the_last_five_count_and_none_that_is_no_number() -> None:
    steps = PlainSteps()
    for multiple in (9.0, 1.2, 1.1, 1.3, 900.0, 0.7, float("inf"), 0.0):
        steps.learn(1.0, multiple)
    assert [*steps.multiples] == [1.2, 1.1, 1.3, 900.0, 0.7]
