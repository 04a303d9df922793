"""The allowance's bound, whatever speculation does; and what it does for speculation that gains."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from specinfer.speculate.policy.allowance import (
    DEFAULT_TOLERANCE,
    KNOWN_COST_TOLERANCE,
    LONGEST_PAUSE,
    LOSS,
    WINDOW,
    Allowance,
)

Step = tuple[float, float]  # time of guesses and time saved, in plain steps


@dataclass
class Driven:
    """A guard driven by steps of one plain step's time, with costs and savings of guesses."""

    tolerance: float = DEFAULT_TOLERANCE
    guard: Allowance = field(init=False)
    seconds: float = 0.0
    lost: float = 0.0
    guessing_steps: list[int] = field(default_factory=list)  # numbers of the steps that allowed speculation
    steps: int = 0

    def __post_init__(self) -> None:
        self.guard = Allowance(self.tolerance)

    def step(
        self,
        spent: float,
        saved: float,
        *,
        plain: float = 1.0,
        read: float = 0.0,
        requests: int = 1,
        new: bool = False,
    ) -> bool:
        """Run one step whose guesses would take and save these seconds."""
        self.steps += 1
        allowed = self.guard.allows(requests, plain, new=new)
        if allowed:
            self.guessing_steps.append(self.steps)
            self.lost += spent + read - saved
            self.seconds += plain + spent + read
            self.guard.count_guessing(plain + spent + read, plain, spent, saved, read)
        else:
            self.seconds += plain
            self.guard.count_plain(plain)
        return allowed

    def bound(self, plain: float = 1.0) -> float:
        return LOSS * self.seconds + 2 * self.tolerance * plain


CHANCE = random.Random(5)
WORKLOADS: dict[str, Callable[[int], Step]] = {
    "never right": lambda step: (1.0, 0.0),
    "never right, and dear": lambda step: (20.0, 0.0),
    "a little slower": lambda step: (0.05, 0.0),
    "slower by less than is noticed": lambda step: (0.0149, 0.0),
    "as it comes": lambda step: (0.5, CHANCE.choice((0.0, 0.0, 1.0))),
    "wildly": lambda step: (CHANCE.expovariate(1), CHANCE.expovariate(1.1)),
    "right until it is trusted": lambda step: (0.5, 2.0 if step % 400 < 100 else 0.0),
    "right for a window": lambda step: (0.5, 0.6 if step // 64 % 2 else 0.0),
    "right at each trial": lambda step: (1.0, 2.0 if step % 65 == 0 else 0.0),
    "pauses of the machine": lambda step: (1000.0 if step % 5000 == 0 else 0.2, 0.3),
}


@pytest.mark.parametrize("tolerance", [DEFAULT_TOLERANCE, KNOWN_COST_TOLERANCE], ids=["usual", "known"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_workload_loses_more_than_the_bound(workload: str, tolerance: float) -> None:
    driven = Driven(tolerance)
    for step in range(6000):
        spent, saved = WORKLOADS[workload](step)
        driven.step(spent, saved)
        if spent <= tolerance:
            assert driven.lost <= driven.bound()
        else:
            driven.lost = 0.0  # a pause of the machine, which is not the guard's fault


def test_nor_does_reading_that_is_never_paid_back() -> None:
    driven = Driven()
    for step in range(20_000):
        driven.step(0.0, 0.0, read=2.0 if step % 3 == 0 else 0.0, new=step % 3 == 0)
    assert driven.lost <= driven.bound() + WINDOW  # reading counts as a loss until it is earned back
    assert driven.seconds < 1.03 * 20_000


def test_what_loses_is_off_after_a_window_and_pauses_double(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    driven = Driven()
    for _ in range(20_000):
        driven.step(0.3, 0.0)
    guessing_steps = driven.guessing_steps
    assert guessing_steps[:WINDOW] == list(range(1, WINDOW + 1)), "a window is looked at first"
    pauses = [later - step - 1 for step, later in pairwise(guessing_steps) if later - step > 1]
    assert pauses[:4] == [64, 128, 256, 512]
    assert max(pauses) == LONGEST_PAUSE
    (record,) = caplog.records
    assert "speculation is off for 64 steps" in record.getMessage()
    assert "it made the last 64 steps slower, by the time of 19.2 steps" in record.getMessage()


def test_the_allowance_is_a_number_whatever_happens() -> None:
    guard = Allowance()
    for step in range(500):
        guard.allows(step % 17, 1e-6 if step % 2 else 10.0, new=False)
        guard.count_guessing(1e9, 1e-6, 1e9, 0.0)
        assert math.isfinite(guard.seconds)
