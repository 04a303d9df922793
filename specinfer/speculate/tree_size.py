"""Who decides how large the trees of a step are: as configured, or where the expected speed is highest.

The text is the same whatever is decided (docs/losslessness.md): a size changes how many tokens a step yields
and what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree


class TreeSize(Protocol):
    """Told what a step has guessed so far; asked by draft models while they guess, and in the end for the trees."""

    def open(self, plan: StepPlan) -> None:
        """A step begins; its trees are one node each."""
        ...

    def add(self, trees: Sequence[TokenTree]) -> None:
        """The trees of the plan's entries now that another speculator has guessed."""
        ...

    def depths(self, draft: str, entries: Sequence[PlanEntry], unread: Sequence[int]) -> list[int]:
        """The levels a draft model may guess for each entry, before it guesses any; 0: it is not to be run.

        `unread` counts the tokens of each entry's text the draft's first pass would read. What a draft would
        guess is not known yet, so its draws may be sampled ones.
        """
        ...

    def deeper(self, draft: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
        """For which entries a draft model that has guessed `trees` may go a level deeper.

        A tree with sampled draws may, since `depths` has decided about it.
        """
        ...

    def fit(self) -> list[TokenTree]:
        """The trees to verify: of each tree, in the order of the plan, the nodes that are worth it."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the trees."""
        ...


class FixedSize:
    """A TreeSize that lets everybody guess as configured, and drops nothing."""

    def __init__(self) -> None:
        self._trees: list[TokenTree] = []

    def open(self, plan: StepPlan) -> None:
        """The trees of a step without speculators."""
        self._trees = [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]

    def add(self, trees: Sequence[TokenTree]) -> None:
        """Keep the trees."""
        self._trees = list(trees)

    def depths(self, draft: str, entries: Sequence[PlanEntry], unread: Sequence[int]) -> list[int]:
        """All levels there may be."""
        return [entry.max_depth for entry in entries]

    def deeper(self, draft: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
        """For all of them."""
        return [True] * len(entries)

    def fit(self) -> list[TokenTree]:
        """The trees as they are."""
        return self._trees

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
