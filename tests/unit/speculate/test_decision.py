"""Reported decisions of a step: speculators that guessed, reasons of others, and expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate import decision as reasons
from specinfer.speculate.decision import Contribution, Decision
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.tree import TokenTree, TreeBuilder
from tests import plans


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
