"""Reported decisions of a step: speculators that guessed, reasons of others, and expectations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate import decision as reasons
from specinfer.speculate.decision import Contribution, Decision
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import AnySpeculator
from specinfer.tree import TokenTree
from tests import plans
from tests.unit.speculate.guessers import Fan, Levels, entry


class Broken(Fan):
    """Raises when it is called."""

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        raise ZeroDivisionError


class NotWorthIt(SpeculationPolicy):
    """Starts no draft."""

    def worth_starting(self, speculator: str, entries: Sequence[PlanEntry], *more: Any) -> list[bool]:
        return [False] * len(entries)


def decided(
    *speculators: AnySpeculator, policy: SpeculationPolicy | None = None, **fields: Any
) -> tuple[Decision, TokenTree]:
    """Return the decision of a one-request step, and its tree."""
    ensemble = Ensemble(speculators, vocab=99, policy=policy or SpeculationPolicy(), clock=lambda: 0.0)
    [tree] = ensemble.propose(plans.plan(entry(**{"max_nodes": 9, **fields})))
    [decision] = ensemble.explain()
    return decision, tree


def test_all_are_named_in_their_order_with_what_was_kept_of_their_guesses() -> None:
    decision, tree = decided(
        *(Fan("a", [10, 11], 2 * [0.9]), Fan("none", []), Levels("b", [10, 12, 13], 3 * [0.9])), max_nodes=4
    )
    assert tree.token_ids == (7, 10, 11, 12)
    assert decision.contributions == (
        Contribution("a", reasons.GUESSED, drawn=2, verified=2, levels=1),
        Contribution("none", reasons.NO_GUESS),
        Contribution("b", reasons.GUESSED, drawn=3, verified=2, levels=3),
    )
    assert decision.expected_tokens is decision.guess_seconds is decision.seconds is None
    assert decision.requests == 1


def test_why_a_draft_has_not_guessed() -> None:
    for fields, policy, why in (
        ({"speculators": ("free",)}, SpeculationPolicy(), reasons.REQUEST),
        ({"max_nodes": 1}, SpeculationPolicy(), reasons.ROOM),
        ({}, NotWorthIt(), reasons.COST),
        ({}, SpeculationPolicy(), reasons.GUESSED),
    ):
        decision, _ = decided(Fan("free", []), Levels("draft", [10]), policy=policy, **fields)
        assert decision.contributions[1].reason == why, fields


def test_who_has_failed_is_told_of() -> None:
    ensemble = Ensemble([Broken("bad", []), Fan("good", [5])], vocab=99, policy=SpeculationPolicy())
    for _ in range(2):
        ensemble.propose(plans.plan(entry(9)))
        [decision] = ensemble.explain()
        assert [one.reason for one in decision.contributions] == [reasons.FAILED, reasons.GUESSED]
