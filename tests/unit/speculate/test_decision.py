"""Reported decisions of a step: speculators that guessed, reasons of others, and expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate import decision as reasons
from specinfer.speculate.decision import Contribution, Decision
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.tree import TokenTree, TreeBuilder
from tests import plans
from tests.unit.speculate.policy.priced import Reckless, sized

HALF = CostCurve((1, 3), (1.0, 2.0))  # a further row takes half of the first row's time


class Chained:
    """Guesses these tokens, one below the other, each as sure as 0.9."""

    def __init__(self, name: str, *tokens: int) -> None:
        self.name = name
        self._tokens = tokens

    def _tree(self, entry: PlanEntry, levels: int) -> TokenTree:
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        node: int | None = 0
        for token in self._tokens[:levels]:
            node = None if node is None else builder.add(node, token, self.name, confidence=0.9)
        return builder.build()


class Chain(Chained, Speculator):
    """The whole chain at once."""

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        return [self._tree(entry, len(self._tokens)) for entry in plan.tree_entries]


class Levels(Chained, LevelSpeculator):
    """The same, a level at a time."""

    def begin(self, plan: StepPlan) -> list[int]:
        self._entries, self._level = plan.entries, 0
        return [1] * len(plan.entries)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        self._level += 1
        return dict.fromkeys(below, (self._level,)) if self._level < len(self._tokens) else {}

    def tree(self, entry: int) -> TokenTree:
        return self._tree(self._entries[entry], self._level)


class Broken(Chain):
    """Raises when it is called."""

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        raise ZeroDivisionError


class NotWorthIt(SpeculationPolicy):
    """Starts no draft."""

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        return [False] * len(entries)


def entry(**fields: Any) -> PlanEntry:
    return plans.entry([3, 7], **{"max_nodes": 9, "max_depth": 5} | fields)


def decided(
    *speculators: Chain, policy: SpeculationPolicy | None = None, **fields: Any
) -> tuple[Decision, TokenTree]:
    """Return the decision of a one-request step, and its tree."""
    ensemble = Ensemble(speculators, vocab=99, policy=policy or SpeculationPolicy(), clock=lambda: 0.0)
    [tree] = ensemble.propose(plans.plan(entry(**fields)))
    [decision] = ensemble.explain()
    return decision, tree


def test_all_are_named_in_their_order_with_what_was_kept_of_their_guesses() -> None:
    decision, tree = decided(Chain("a", 10, 11), Chain("none"), Levels("b", 10, 12, 13), max_nodes=4)
    assert tree.token_ids == (7, 10, 11, 12)
    assert decision.contributions == (
        Contribution("a", reasons.GUESSED, drawn=2, verified=2, levels=2),
        Contribution("none", reasons.NO_GUESS),
        Contribution("b", reasons.GUESSED, drawn=3, verified=2, levels=3),
    )
    assert (decision.expected_tokens, decision.guess_seconds, decision.seconds, decision.requests) == (
        None,
        None,
        None,
        1,
    )


@pytest.mark.parametrize(
    ("fields", "policy", "why"),
    [
        ({"speculators": ("free",)}, SpeculationPolicy(), reasons.REQUEST),
        ({"max_nodes": 1}, SpeculationPolicy(), reasons.ROOM),
        ({}, NotWorthIt(), reasons.COST),
        ({}, SpeculationPolicy(), reasons.GUESSED),
    ],
)
def test_why_a_draft_has_not_guessed(fields: dict[str, Any], policy: SpeculationPolicy, why: str) -> None:
    decision, _ = decided(Chain("free"), Levels("draft", 10), policy=policy, **fields)
    assert decision.contributions[1].reason == why


def test_who_has_failed_is_told_of() -> None:
    ensemble = Ensemble([Broken("bad"), Chain("good", 5)], vocab=99, policy=SpeculationPolicy())
    for _ in range(2):
        ensemble.propose(plans.plan(entry()))
        [decision] = ensemble.explain()
        assert [one.reason for one in decision.contributions] == [reasons.FAILED, reasons.GUESSED]


def test_hopes_and_seconds_are_those_that_nodes_were_chosen_by() -> None:
    decision, tree = decided(Chain("a", 10, 11, 12, 13, 14), policy=sized(HALF))
    # As in test_cost_policy: three of the probabilities .88 .78 .68 .60 ... pay.
    assert tree.num_nodes == 4
    assert decision.probabilities == pytest.approx((1, 0.881, 0.776, 0.683), abs=1e-3)
    assert decision.expected_tokens == pytest.approx(3.34, abs=0.01)
    assert (decision.guess_seconds, decision.seconds) == (pytest.approx(1.5), pytest.approx(2.5))


def test_passes_of_drafts_are_in_the_price() -> None:
    draft = CostCurve((1, 9), (0.125, 0.125))
    free = CostCurve((1, 9), (1.0, 1.0))
    decision, tree = decided(Levels("draft", 10, 11), policy=sized(free, draft, (1, 1)))
    assert tree.num_nodes == 3
    assert (decision.guess_seconds, decision.seconds) == (pytest.approx(0.25), pytest.approx(1.25))


def test_prompts_are_in_the_seconds_and_not_in_the_price() -> None:
    text = [*range(9), 7]
    ensemble = Ensemble([Chain("a", 10)], vocab=99, policy=sized(HALF))
    ensemble.propose(plans.plan(plans.entry(text, rows=3, max_nodes=9, max_depth=5)))
    [decision] = ensemble.explain()
    assert (decision.guess_seconds, decision.seconds) == (pytest.approx(0.5), pytest.approx(2.5))


class Silent(SpeculationPolicy):
    """Forbids all guesses, without a reason."""

    def begin_step(self, plan: StepPlan) -> StepPlan:
        return StepPlan(tuple(replace(entry, speculators=()) for entry in plan.entries))


def test_why_a_policy_lets_nobody_guess_may_not_be_known() -> None:
    decision, _ = decided(Chain("a", 10), policy=Silent())
    assert decision.contributions[0].reason == reasons.HELD


def test_why_the_guard_lets_nobody_guess() -> None:
    policy = Reckless(CostModel("target", HALF), CostModel("draft", HALF))
    ensemble = Ensemble([Chain("a", 10)], vocab=99, policy=policy, clock=lambda: 0.0)
    reasons_given = []
    for _ in range(200):
        ensemble.propose(plans.plan(entry()))
        [decision] = ensemble.explain()
        reasons_given.append(decision.contributions[0].reason)
        seconds = 3.0 if reasons_given[-1] == reasons.GUESSED else 1.0  # guesses lose, and none is right
        ensemble.observe(StepReport([plans.outcome(5)], {"target_forward": seconds}))
    assert reasons_given[:6] == [reasons.PLAIN] * 5 + [reasons.GUESSED]
    assert reasons_given[-1] == reasons.GUARD


def test_a_step_takes_what_plain_ones_take_besides_their_pass() -> None:
    policy = Reckless(CostModel("target", HALF), CostModel("draft", HALF))
    ensemble = Ensemble([Chain("a", 10)], vocab=99, policy=policy, clock=lambda: 0.0)
    for _ in range(5):  # plain ones: a pass of 1 s, and 0.5 s of other things
        ensemble.propose(plans.plan(entry()))
        ensemble.observe(StepReport([plans.outcome(5)], {"target_forward": 1.0, "schedule": 0.5}))
    ensemble.propose(plans.plan(entry()))
    [decision] = ensemble.explain()
    assert decision.seconds is not None
    assert decision.guess_seconds is not None
    assert decision.seconds - decision.guess_seconds == pytest.approx(1.5, rel=0.02)


def test_a_decision_as_json() -> None:
    decision, _ = decided(Chain("a", 10), Chain("b"), policy=sized(HALF))
    assert decision.to_json() == {
        "speculators": [
            {"name": "a", "reason": "guessed", "drawn": 1, "verified": 1, "levels": 1},
            {"name": "b", "reason": "no guess", "drawn": 0, "verified": 0, "levels": 0},
        ],
        "expected_tokens": 1.8808,
        "probabilities": [1.0, 0.8808],
        "guess_seconds": 0.5,
        "expected_seconds": 1.5,
        "requests": 1,
    }
