"""What a policy owes: the ensemble asks it in every step, and tells it what became of that.

The text is the same whatever is decided (docs/losslessness.md): it changes how many tokens a step yields and
what the step costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree


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

    `seconds` are those of each stage of the step so far (engine/steps.py), and `observe`: what speculators
    took to learn of it. None are given where requests end outside of a step.
    """

    outcomes: Sequence[Outcome]
    seconds: Mapping[str, float] = field(default_factory=dict)
    passes: Sequence[LevelPass] = ()


class SpeculationPolicy(Protocol):
    """Asked by the ensemble between the guesses of a step, in this order; told of every outcome."""

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """A step begins: nothing is guessed yet. The plan as speculators are to see it.

        Its entries are the plan's own; only who may guess for each may differ (`PlanEntry.speculators`).
        """
        ...

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """For which entries a level speculator draws its first level, or reads where there is no tree.

        It has not read `unread` tokens of each text, and would read them now. `guessed` is what others have
        guessed so far, for each of `plan.tree_entries`.
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


def has_own_size(entry: PlanEntry) -> bool:
    """Whether the request itself says how large its trees are."""
    overrides = entry.request.params.speculation
    return overrides.expansion is not None or overrides.max_nodes is not None
