"""The guard forbids guesses, except for requests with a fixed size; and costs learn."""

from __future__ import annotations

import math
from typing import Any

from specinfer import SamplingParams
from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.allowance import WINDOW
from specinfer.speculate.policy.guard import PLAIN_FIRST, Guard, PlainSteps
from specinfer.speculate.policy.policy import StepReport
from specinfer.speculate.speculator import Speculator
from specinfer.tree import TokenTree, TreeBuilder
from tests import plans
from tests.unit.speculate.policy.priced import Reckless

CURVE = CostCurve((1, 100), (1.0, 2.0))
OWN_SIZE = SpeculationParams(max_nodes=9)


class Asked(Speculator):
    """Guesses one wrong token, and records the requests."""

    name = "asked"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.knows = True  # a token

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        self.asked.extend(entry.request.request_id for entry in plan.entries)
        trees = []
        for entry in plan.tree_entries:
            builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
            if self.knows:
                builder.add(0, 50, self.name, confidence=0.5)
            trees.append(builder.build())
        return trees


def entry(name: str = "r", *, overrides: SpeculationParams | None = None, **fields: Any) -> PlanEntry:
    params = SamplingParams(temperature=0, speculation=overrides)
    return plans.entry([*range(20), 7], request_id=name, params=params, **fields)


class Driven:
    """An ensemble of one guesser under a guarded policy, whose steps take the seconds a test says."""

    def __init__(self) -> None:
        self.guesser = Asked()
        self.target = CostModel(CURVE)
        self.draft = CostModel(CostCurve((1, 100), (0.25, 1.0)))
        self.policy = Reckless(self.target, self.draft)
        self.ensemble = Ensemble([self.guesser], vocab=99, policy=self.policy, clock=lambda: 0.0)

    def step(
        self,
        *entries: PlanEntry,
        seconds: float = 1.0,
        propose: float = 0.0,
        tokens: int = 1,
        plain: float = 1.0,
    ) -> list[str]:
        """Run one step that takes `seconds` if a speculator guesses; return its requests."""
        self.guesser.asked = []
        plan = plans.plan(*(entries or (entry(),)))
        trees = self.ensemble.propose(plan)
        assert len(trees) == len(plan.tree_entries)
        stages = {"propose": propose, "target_forward": seconds}
        if not self.guesser.asked and math.isfinite(seconds) and seconds > 0:
            stages = {"propose": 0.0, "target_forward": plain}
        outcomes = [plans.outcome(*range(tokens), request_id=e.request.request_id) for e in plan.tree_entries]
        self.ensemble.observe(StepReport(outcomes, stages))
        return self.guesser.asked

    @property
    def guard(self) -> Guard:
        return self.policy.guard

    def until_off(self, *entries: PlanEntry, **took: float) -> int:
        """Steps that lose, until the guard has had enough."""
        for step in range(1000):
            self.step(*entries, **took)
            if not self.guard.allowance.guessing:
                return step
        raise AssertionError("never off")


def test_who_has_a_size_of_its_own_is_guessed_for_all_the_same() -> None:
    driven = Driven()
    for _ in range(PLAIN_FIRST):
        driven.step(seconds=1.0)
    driven.until_off(propose=9.0)  # which leaves nothing to try a new request with
    both = entry("asking", overrides=OWN_SIZE), entry()
    assert [driven.step(*both) for _ in range(10)] == 10 * [["asking"]]


def test_a_step_without_a_guess_loses_what_looking_for_one_took() -> None:
    """This holds however slow the machine is: a step without guesses would be as slow."""
    driven = Driven()
    for _ in range(PLAIN_FIRST):
        driven.step()
    driven.guesser.knows = False
    for _ in range(4 * WINDOW):
        driven.step(seconds=1.5)
    assert driven.guard.allowance.guessing
    assert driven.until_off(propose=0.5) < 4 * WINDOW


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
