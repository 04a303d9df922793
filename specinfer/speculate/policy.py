"""Who guesses in a step, how deep, and which guesses are verified: one policy decides.

The text is the same whatever is decided (docs/losslessness.md): it changes how many tokens a step yields and
what the step costs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.speculator import LevelOutcome, Outcome
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled
from specinfer.tree.expansion import Expansion

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LevelPass:
    """What one level of a level speculator's trees took."""

    speculator: str
    level: int  # 0: the root's children, and what it read of texts
    rows: int  # tokens of texts that it was to read, or nodes that it ran
    seconds: float  # the decision who goes on included


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step came to: what a policy learns from, besides the trees it was shown.

    `seconds` are those of each stage of the step so far (engine/metrics.py), and `observe`: what speculators
    took to learn of it. None are given where requests end outside of a step.
    """

    outcomes: Sequence[Outcome]
    seconds: Mapping[str, float] = field(default_factory=dict)
    passes: Sequence[LevelPass] = ()
    # By level speculator what its pass has shown of places at which it was not asked (hindsight.py).
    hindsight: Mapping[str, Sequence[LevelOutcome]] = field(default_factory=dict)


class SpeculationPolicy(Protocol):
    """Asked by the ensemble between the guesses of a step, in this order; told of every outcome."""

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """A step begins: nothing is guessed yet. The plan as speculators are to see it.

        Its entries are the plan's own; only who may guess for each may differ (`PlanEntry.speculators`).
        """
        ...

    def show(self, trees: Sequence[TokenTree]) -> None:
        """What was guessed so far for each of `plan.tree_entries`; before a level speculator is asked."""
        ...

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """For which entries a level speculator draws its first level, or reads where there is no tree.

        It has not read `unread` tokens of each text, and would read them now.
        """
        ...

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Below which of `ends` a level speculator that has drawn `trees` for these entries draws next.

        `ends` are nodes of each tree; of each entry some, all or none of them are given back. Sampled draws
        may be looked at: whether a node gets children never depends on what these would be.
        """
        ...

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Of each of `plan.tree_entries`' trees, now that all have guessed, the nodes worth verifying."""
        ...

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        """What is expected of the step with these trees, the last it chose; None: it does not weigh them.

        Only asked where somebody wants to see it, before `observe`.
        """
        ...

    def observe(self, report: StepReport) -> None:
        """Learn what became of the trees, and what the step cost."""
        ...


class FixedPolicy:
    """Lets everybody guess as configured, and drops nothing."""

    def __init__(self, learned: Expansion | None = None) -> None:
        """`learned` is given where drafts' trees have a learned shape, which has to come from somebody.

        Of such trees as many nodes of each level are run as those of this shape have, the likeliest ones.
        """
        self._learned = learned

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """The plan as it is."""
        return plan

    def show(self, trees: Sequence[TokenTree]) -> None:
        """Nothing to remember."""

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """All of them."""
        return [True] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """All of them; of trees without a shape the likeliest."""
        shape = self._learned
        if shape is None:
            return list(ends)
        return [
            of_tree
            if has_own_size(entry) or any_sampled(tree.draws)
            else _likeliest_ends(tree, of_tree, shape)
            for entry, tree, of_tree in zip(entries, trees, ends, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees as they are."""
        return list(trees)

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        """Nothing is weighed."""
        return None

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""


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

    def show(self, trees: Sequence[TokenTree]) -> None:
        """As the policy does."""
        try:
            self._policy.show(trees)
        except Exception:
            self._failed().show(trees)

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """As the policy says."""
        try:
            return _as_many(self._policy.worth_starting(speculator, entries, unread), entries)
        except Exception:
            return self._failed().worth_starting(speculator, entries, unread)

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


def _likeliest_ends(tree: TokenTree, ends: Sequence[int], shape: Expansion) -> Sequence[int]:
    """Of the ends at a tree's deepest level the likeliest, as many as the shape has there."""
    depths, likely = tree.depths(), tree.likelihoods()
    deepest = max(depths)
    if deepest >= shape.depth:
        return ()
    last = [end for end in ends if depths[end] == deepest]
    return sorted(last, key=likely.__getitem__, reverse=True)[: prod(shape.widths[:deepest])]


def has_own_size(entry: PlanEntry) -> bool:
    """Whether the request itself says how large its trees are."""
    overrides = entry.request.params.speculation
    return overrides.expansion is not None or overrides.max_nodes is not None


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
