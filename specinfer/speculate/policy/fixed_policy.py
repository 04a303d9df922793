"""A policy that looks at nothing: everybody guesses as configured."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from specinfer.config import SpeculationConfig
from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.policy.speculation_policy import StepReport, has_own_size
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled
from specinfer.tree.expansion import Expansion


class FixedPolicy:
    """Lets everybody guess as configured, and drops nothing."""

    def __init__(self, learned: Expansion | None = None) -> None:
        """`learned` is given where drafts' trees have a learned shape, which has to come from somebody.

        Of such trees as many nodes of each level are run as those of this shape have, the likeliest ones.
        """
        self._learned = learned

    @classmethod
    def of(cls, speculation: SpeculationConfig) -> FixedPolicy:
        """The policy that takes the place of one that fails."""
        return cls(speculation.fixed_expansion if speculation.learns_shape else None)

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """The plan as it is."""
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
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


def _likeliest_ends(tree: TokenTree, ends: Sequence[int], shape: Expansion) -> Sequence[int]:
    """Of the ends at a tree's deepest level the likeliest, as many as the shape has there."""
    depths, likely = tree.depths(), tree.likelihoods()
    deepest = max(depths)
    if deepest >= shape.depth:
        return ()
    last = [end for end in ends if depths[end] == deepest]
    return sorted(last, key=likely.__getitem__, reverse=True)[: prod(shape.widths[:deepest])]
