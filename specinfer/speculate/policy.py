"""Who guesses in a step, how deep, and which guesses are verified: one policy decides.

The text is the same whatever is decided (docs/losslessness.md): it changes how many tokens a step yields and
what the step costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree

_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step came to: what a policy learns from, besides the trees it was shown."""

    outcomes: Sequence[Outcome]
    seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # of each stage of the step (engine/metrics.py)


class SpeculationPolicy(Protocol):
    """Asked by the ensemble between the guesses of a step, in this order; told of every outcome."""

    def begin_step(self, plan: StepPlan) -> None:
        """A step begins: nothing is guessed yet."""
        ...

    def show(self, trees: Sequence[TokenTree]) -> None:
        """What was guessed so far for each of `plan.tree_entries`; shown before a speculator is asked."""
        ...

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """For which entries a level speculator draws its first level, or reads where there is no tree.

        It has not read `unread` tokens of each text, and would read them now.
        """
        ...

    def worth_deepening(
        self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]
    ) -> list[bool]:
        """For which entries a level speculator that has drawn `trees`, all of one depth, draws another level.

        Sampled draws may be looked at: whether a level is drawn never depends on what it would hold.
        """
        ...

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Of each of `plan.tree_entries`' trees, now that all have guessed, the nodes worth verifying."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn what became of the trees, and what the step cost."""
        ...


class FixedPolicy:
    """Lets everybody guess as configured, and drops nothing."""

    def begin_step(self, plan: StepPlan) -> None:
        """Nothing to prepare."""

    def show(self, trees: Sequence[TokenTree]) -> None:
        """Nothing to remember."""

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """All of them."""
        return [True] * len(entries)

    def worth_deepening(
        self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]
    ) -> list[bool]:
        """All of them."""
        return [True] * len(entries)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees as they are."""
        return list(trees)

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""


class TrustedPolicy:
    """A policy as long as it works: one that raises is replaced by `FixedPolicy`, and logged once.

    Deciding badly costs time, and no text; so a broken policy must cost no text either.
    """

    def __init__(self, policy: SpeculationPolicy) -> None:
        self._policy = policy

    def begin_step(self, plan: StepPlan) -> None:
        """As the policy does."""
        self._ask(lambda policy: policy.begin_step(plan))

    def show(self, trees: Sequence[TokenTree]) -> None:
        """As the policy does."""
        self._ask(lambda policy: policy.show(trees))

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """As the policy says."""
        return self._ask(lambda policy: _as_many(policy.worth_starting(speculator, entries, unread), entries))

    def worth_deepening(
        self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]
    ) -> list[bool]:
        """As the policy says."""
        return self._ask(lambda policy: _as_many(policy.worth_deepening(speculator, entries, trees), entries))

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """As the policy says, as long as every tree keeps its root and grows no node."""
        return self._ask(lambda policy: _parts_of(policy.choose_nodes(trees), trees))

    def observe(self, report: StepReport) -> None:
        """As the policy does."""
        self._ask(lambda policy: policy.observe(report))

    def _ask(self, question: Callable[[SpeculationPolicy], _Answer]) -> _Answer:
        try:
            return question(self._policy)
        except Exception:
            _LOG.exception(
                "the speculation policy %s failed; trees have their configured size from here on",
                type(self._policy).__name__,
            )
            self._policy = FixedPolicy()
            return question(self._policy)


def _as_many(answers: list[bool], entries: Sequence[PlanEntry]) -> list[bool]:
    if len(answers) != len(entries):
        raise ValueError(f"{len(answers)} answers about {len(entries)} entries; give one for each")
    return answers


def _parts_of(chosen: list[TokenTree], trees: Sequence[TokenTree]) -> list[TokenTree]:
    if len(chosen) != len(trees):
        raise ValueError(f"{len(chosen)} trees chosen of {len(trees)}; give one for each")
    for part, tree in zip(chosen, trees, strict=True):
        if part.token_ids[0] != tree.token_ids[0] or part.num_nodes > tree.num_nodes:
            raise ValueError(f"{part} is no part of {tree}; choose among its nodes, the root included")
    return chosen
