"""SpeculationPolicy: the base class of policies, and what they learn from.

A policy changes how many tokens a step yields and how long the step takes, never the text
(docs/losslessness.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree


@dataclass(frozen=True, slots=True)
class LevelPass:
    """Time of one level of a level speculator's trees."""

    speculator: str
    level: int  # 0: the root's children, and reading texts
    rows: int  # tokens read, or nodes run
    seconds: float  # including the decision about the next level


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of a step.

    `seconds` has the time of each stage of the step (engine/steps.py), and as `observe` the time of the
    speculators' `observe`. It is empty for requests that end outside a step.
    """

    outcomes: Sequence[Outcome]
    seconds: Mapping[str, float] = field(default_factory=dict)
    passes: Sequence[LevelPass] = ()


class SpeculationPolicy:
    """The policy of trees of a fixed size, and the base class of others: it keeps all nodes.

    In every step the ensemble calls its methods in the order of their definition. A policy that raises is
    logged, and an instance of this class replaces it (ensemble.py).
    """

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Start a step; returns the plan for the speculators.

        Only the speculators that may guess for each entry may differ (`PlanEntry.speculators`).
        """
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """Return for which entries a level speculator draws its first level, or reads one without a tree.

        It would now read the `unread` tokens of each text. `guessed` has the merged tree so far of each of
        `plan.tree_entries`.
        """
        return [True] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Return the nodes among `ends` of each entry's tree below which a level speculator draws next.

        The decision may depend on sampled draws, as it never depends on the values of the children drawn
        next.
        """
        return list(ends)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the part to verify of the merged tree of each of `plan.tree_entries`."""
        return list(trees)

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        """Return estimates for the step with the trees it chose last, or None if it makes none.

        Called before `observe`, and only for display.
        """
        return None

    def observe(self, report: StepReport) -> None:
        """Learn the outcome of every guess and the time of the step. Does nothing by default."""


def has_own_size(entry: PlanEntry) -> bool:
    """Return whether the request sets the size or shape of its trees."""
    overrides = entry.request.params.speculation
    return overrides.expansion is not None or overrides.max_nodes is not None
