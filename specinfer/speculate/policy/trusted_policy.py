"""A policy of anybody's, held to what a policy owes: what is no answer costs time, and no text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.speculation_policy import SpeculationPolicy, StepReport
from specinfer.tree import TokenTree

_LOG = logging.getLogger(__name__)


class TrustedPolicy:
    """A policy as long as it works: one that raises is replaced by a fixed one, and logged once.

    Deciding badly costs time, and no text; so a broken policy must cost no text either.
    """

    def __init__(self, policy: SpeculationPolicy, fixed: FixedPolicy | None = None) -> None:
        """`fixed` takes its place; by default one of trees that have a shape."""
        self._policy = policy
        self._fixed = fixed or FixedPolicy()

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """As the policy says, as long as its plan is of the same requests."""
        try:
            return _same_requests(self._policy.begin_step(plan), plan)
        except Exception:
            return self._failed().begin_step(plan)

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """As the policy says."""
        try:
            return _as_many(self._policy.worth_starting(speculator, entries, unread, guessed), entries)
        except Exception:
            return self._failed().worth_starting(speculator, entries, unread, guessed)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """As the policy says, as long as they are some of the ends."""
        try:
            return _some_of(self._policy.worth_deepening(speculator, entries, trees, ends), ends)
        except Exception:
            return self._failed().worth_deepening(speculator, entries, trees, ends)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """As the policy says, as long as every tree keeps its root and grows no node."""
        try:
            return _parts_of(self._policy.choose_nodes(trees), trees)
        except Exception:
            return self._failed().choose_nodes(trees)

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        """As the policy does, as long as it says something of every node."""
        try:
            return _of_every_node(self._policy.appraise(trees), trees)
        except Exception:
            return self._failed().appraise(trees)

    def observe(self, report: StepReport) -> None:
        """As the policy does."""
        try:
            self._policy.observe(report)
        except Exception:
            self._failed().observe(report)

    def _failed(self) -> SpeculationPolicy:
        """Say that the policy has raised, and who decides from here on."""
        _LOG.exception(
            "the speculation policy %s failed; trees are no longer sized by what they cost",
            type(self._policy).__name__,
        )
        self._policy = self._fixed
        return self._policy


def _same_requests(shown: StepPlan, plan: StepPlan) -> StepPlan:
    if shown is not plan and [e.request for e in shown.entries] != [e.request for e in plan.entries]:
        raise ValueError(f"a plan of {len(shown.entries)} entries for one of {len(plan.entries)}; keep each")
    return shown


def _as_many(answers: list[bool], entries: Sequence[PlanEntry]) -> list[bool]:
    if len(answers) != len(entries):
        raise ValueError(f"{len(answers)} answers about {len(entries)} entries; give one for each")
    return answers


def _some_of(chosen: list[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    if len(chosen) != len(ends):
        raise ValueError(f"{len(chosen)} answers about {len(ends)} entries; give one for each")
    for nodes, allowed in zip(chosen, ends, strict=True):
        if nodes is not allowed and not (set(nodes) <= set(allowed) and len(set(nodes)) == len(nodes)):
            raise ValueError(f"nodes {[*nodes]} of {[*allowed]}; choose among these, each once")
    return chosen


def _of_every_node(appraisal: Appraisal | None, trees: Sequence[TokenTree]) -> Appraisal | None:
    if appraisal is not None and [len(hopes) for hopes in appraisal.hopes] != [t.num_nodes for t in trees]:
        raise ValueError(f"hopes of {len(appraisal.hopes)} trees, of {len(trees)}; give one for each node")
    return appraisal


def _parts_of(chosen: list[TokenTree], trees: Sequence[TokenTree]) -> list[TokenTree]:
    if len(chosen) != len(trees):
        raise ValueError(f"{len(chosen)} trees chosen of {len(trees)}; give one for each")
    for part, tree in zip(chosen, trees, strict=True):
        if part is not tree and (part.token_ids[0] != tree.token_ids[0] or part.num_nodes > tree.num_nodes):
            raise ValueError(f"{part} is no part of {tree}; choose among its nodes, the root included")
    return chosen
