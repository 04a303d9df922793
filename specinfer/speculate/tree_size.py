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
    """Asked by draft models while they guess, and by the ensemble when all have."""

    def open(self, plan: StepPlan) -> None:
        """A step begins."""
        ...

    def note(self, trees: Sequence[TokenTree]) -> None:
        """What has been guessed so far for each of the plan's entries; told before a speculator is asked."""
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

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Of each of the plan's trees, now that all have guessed, the nodes that are worth verifying."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the trees."""
        ...


class FixedSize:
    """A TreeSize that lets everybody guess as configured, and drops nothing."""

    def open(self, plan: StepPlan) -> None:
        """All steps are alike."""

    def note(self, trees: Sequence[TokenTree]) -> None:
        """All trees are alike."""

    def depths(self, draft: str, entries: Sequence[PlanEntry], unread: Sequence[int]) -> list[int]:
        """All levels there may be."""
        return [entry.max_depth for entry in entries]

    def deeper(self, draft: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
        """For all of them."""
        return [True] * len(entries)

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees as they are."""
        return list(trees)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
