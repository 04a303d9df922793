"""The base of policies: the ensemble asks one in every step, and tells it every outcome.

The text is the same whatever is decided (docs/losslessness.md): it changes how many tokens a step yields and
how long the step takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.speculator import Outcome
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled
from specinfer.tree.expansion import Expansion


@dataclass(frozen=True, slots=True)
class LevelPass:
    """The time that one level of a level speculator's trees took."""

    speculator: str
    level: int  # 0: the root's children, and the texts it read
    rows: int  # tokens of texts that it was to read, or nodes that it ran
    seconds: float  # deciding which requests go on included


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of a step: a policy learns from it, besides the trees it was shown.

    `seconds` are those of each stage of the step so far (engine/metrics.py), and `observe`: the time
    speculators took to learn of it. None are given where requests end outside of a step.
    """

    outcomes: Sequence[Outcome]
    seconds: Mapping[str, float] = field(default_factory=dict)
    passes: Sequence[LevelPass] = ()


class SpeculationPolicy:
    """The policy of trees of a fixed size, and the base of others: it drops nothing, and never refuses.

    The ensemble asks it between the guesses of a step, in the order of its methods, and tells it every
    outcome. One that raises is logged once, and one of this class takes its place (ensemble.py).
    """

    def __init__(self, learned: Expansion | None = None) -> None:
        """`learned` is given where drafts' trees have no shape of their own.

        Of such trees as many nodes of each level are run as those of this shape have, the likeliest ones.
        """
        self._learned = learned

    @classmethod
    def instead(cls, speculation: SpeculationConfig) -> SpeculationPolicy:
        """The policy that takes the place of one that fails."""
        return SpeculationPolicy(speculation.fixed_expansion if speculation.learns_shape else None)

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """A step begins, without guesses as yet. The plan as speculators are to see it.

        Its entries are the plan's own; only the speculators that may guess for each may differ
        (`PlanEntry.speculators`).
        """
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """For which entries a level speculator draws its first level, or reads where there is no tree.

        It has not read `unread` tokens of each text, and would read them now. `guessed` is the tree of
        others' guesses so far, for each of `plan.tree_entries`.
        """
        return [True] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Below which of `ends` a level speculator that has drawn `trees` for these entries draws next.

        `ends` are nodes of each tree; of each entry some, all or none of them are given back. Sampled draws
        may be looked at: whether a node gets children never depends on the children's values.
        """
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
        """Of each of `plan.tree_entries`' trees, now that all have guessed, the part worth verifying."""
        return list(trees)

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        """The expectations of the step with these trees, the last it chose; None: it does not weigh them.

        Only asked where somebody wants to see it, before `observe`.
        """
        return None

    def observe(self, report: StepReport) -> None:
        """Learn the outcome of every guess, and the time the step took."""


def has_own_size(entry: PlanEntry) -> bool:
    """Whether the request itself says how large its trees are."""
    overrides = entry.request.params.speculation
    return overrides.expansion is not None or overrides.max_nodes is not None


def _likeliest_ends(tree: TokenTree, ends: Sequence[int], shape: Expansion) -> Sequence[int]:
    """Of the ends at a tree's deepest level the likeliest, as many as the shape has there."""
    depths, likely = tree.depths(), tree.likelihoods()
    deepest = max(depths)
    if deepest >= shape.depth:
        return ()
    last = [end for end in ends if depths[end] == deepest]
    return sorted(last, key=likely.__getitem__, reverse=True)[: prod(shape.widths[:deepest])]
