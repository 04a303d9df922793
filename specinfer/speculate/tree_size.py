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
    """Asked before a speculator guesses, and again when all have."""

    def open(self, plan: StepPlan) -> None:
        """A step begins."""
        ...

    def depths(self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[int]:
        """The levels `speculator` may guess for each entry whose tree is that of `trees` so far; 0: none.

        What a speculator would guess is not known yet, so its trees may be sampled ones.
        """
        ...

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees to verify: of each tree, in the order of the plan, the nodes that are worth it."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the trees."""
        ...


class FixedSize:
    """A TreeSize that lets everybody guess as configured, and drops nothing."""

    def open(self, plan: StepPlan) -> None:
        """Every step is alike."""

    def depths(self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[int]:
        """All levels there may be."""
        return [entry.max_depth for entry in entries]

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The trees as they are."""
        return list(trees)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
