"""How many levels a draft model has been worth, and what they cost.

A level is one pass of the draft and brings a token for every request whose text goes on as it guessed. So
what counts is how often the draft goes on rightly at each level, given that it was right so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tree.expansion import Expansion

_PRIOR_RATE: Final = 0.7  # of the first level, before anything was seen
_PRIOR: Final = 4.0  # guesses; a level nobody has been to is thought to be like the one above it
_MEMORY: Final = 0.99  # what a count keeps at each new outcome


@dataclass(slots=True)
class _Level:
    """How often the guesses at one level held the next token, fading."""

    hits: float = 0.0
    tries: float = 0.0


class DraftDepth:
    """One draft's costs, and how its levels have done; `unread` counts the tokens it has yet to read."""

    def __init__(self, curve: CostCurve, expansion: Expansion, unread: Callable[[PlanEntry], int]) -> None:
        self._curve = curve
        self._unread = unread
        self._levels = [_Level() for _ in expansion.widths]
        self._frontiers = list(accumulate((1, *expansion.widths[:-1]), mul))  # rows of a request in each pass

    @property
    def deepest(self) -> int:
        """The levels of a full tree."""
        return len(self._levels)

    def learn(self, level: int, hit: bool) -> None:
        """Count whether the guesses at `level`, 0 being the root's children, held the text's next token."""
        if level < len(self._levels):
            seen = self._levels[level]
            seen.hits = _MEMORY * seen.hits + hit
            seen.tries = _MEMORY * seen.tries + 1

    def yields(self) -> list[float]:
        """The probability that a text goes on through a tree to each level, [deepest]."""
        rate, reached = _PRIOR_RATE, 1.0
        yields: list[float] = []
        for level in self._levels:
            rate = (level.hits + _PRIOR * rate) / (level.tries + _PRIOR)
            reached *= rate
            yields.append(reached)
        return yields

    def passes(self, requests: int) -> list[float]:
        """Seconds of the pass of each level, with so many requests in it, [deepest]."""
        return list(map(float, self._curve.seconds([requests * rows for rows in self._frontiers])))

    def reading(self, entries: Sequence[PlanEntry]) -> list[float]:
        """Seconds that reading what the draft has not seen of each entry's text adds to its first pass."""
        rows = [self._unread(entry) for entry in entries]
        return list(map(float, self._curve.seconds(rows) - self._curve.seconds([1])))
