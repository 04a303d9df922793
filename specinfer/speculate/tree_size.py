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

    def starts(self, draft: str, entries: Sequence[PlanEntry], unread: Sequence[int]) -> list[bool]:
        """For which entries a draft model is run; its first pass would read `unread` tokens of each text."""
        ...

    def deeper(self, draft: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
        """For which entries a draft model that has guessed `trees`, all of one depth, guesses another level.

        Sampled draws may be looked at: whether a level is drawn never depends on what it would hold.
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

    def starts(self, draft: str, entries: Sequence[PlanEntry], unread: Sequence[int]) -> list[bool]:
        """For all of them."""
        return [True] * len(entries)

    def deeper(self, draft: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
        """For all of them."""
        return [True] * len(entries)

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees as they are."""
        return list(trees)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
