"""What the levels of a draft's trees cost, and how often they were right.

A level is one pass of the draft and brings a token for every request whose text goes on as it guessed. So
what counts is how often the draft goes on rightly at each level, given that it was right so far; and how
often with its first guess below a node, as each of the others costs the target a row more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from specinfer.runtime.cost_model import PassCosts
from specinfer.speculate import bounded
from specinfer.tree.expansion import Expansion

_PRIOR_RATE: Final = 0.7  # of the first guess, before anything was seen
_PRIOR: Final = 3.0  # guesses; a level nobody has been to is thought to be like the one above it
_MEMORY: Final = 0.97  # what a count keeps at each new outcome: the last 30 decide
_MOST: Final = 1e4  # outcomes that levels of a full batch can come to


@dataclass(slots=True)
class _Level:
    """How often the guesses at one level held the next token, fading."""

    firsts: float = 0.0  # as the first of them
    others: float = 0.0  # as another
    tries: float = 0.0


class LevelRate(NamedTuple):
    """How likely the first guess below a node of the text is right, and one of the others."""

    first: float
    other: float

    @property
    def any(self) -> float:
        """How likely one of all is."""
        return self.first + self.other


class DraftCosts:
    """One draft model's costs, by `costs`, and how the levels of its trees have done.

    Trees of samples have the shape of `expansion`, others at most `deepest` levels, or as many.
    """

    def __init__(self, costs: PassCosts, expansion: Expansion, deepest: int = 0) -> None:
        self._costs = costs
        self._widths = expansion.widths
        self._levels = [_Level() for _ in range(max(deepest, expansion.depth))]
        self._rates: list[LevelRate] = []  # of the levels; empty: to be computed

    def learn(self, level: int, choice: int | None) -> None:
        """Count which of the guesses at `level`, 0 being the root's children, was right; None: none was."""
        if level == 0:  # what is not tried any more is forgotten as well
            for seen in self._levels:
                seen.firsts *= _MEMORY
                seen.others *= _MEMORY
                seen.tries *= _MEMORY
        if level < len(self._levels):
            seen = self._levels[level]
            seen.firsts += choice == 0
            seen.others += bool(choice)
            seen.tries += 1
        self._rates = []

    def to_json(self) -> list[list[float]]:
        """How often the first guess and others were right at each level, and the tries."""
        return [[level.firsts, level.others, level.tries] for level in self._levels]

    def recall(self, levels: Sequence[Sequence[float]]) -> None:
        """Take over what `to_json` gave, of as many levels as there are."""
        for level, (firsts, others, tries) in zip(self._levels, levels, strict=False):
            level.firsts, level.others, level.tries = firsts, others, tries
        self._rates = []

    def rates(self) -> list[LevelRate]:
        """How likely guesses at each level are right where a text got there."""
        if not self._rates:
            self._rates = rates_of(self.to_json())
        return self._rates

    def width(self, level: int) -> int:
        """The samples that a node at this depth gets."""
        return self._widths[min(level, len(self._widths) - 1)]

    def rate(self, level: int) -> LevelRate:
        """The same of one level; of those that are too deep the deepest's."""
        rates = self.rates()
        return rates[min(level, len(rates) - 1)]

    def passes(self, most: int) -> Sequence[float]:
        """Seconds of passes of 0, 1, ... `most` rows."""
        return self._costs.table(most)

    def seconds(self, rows: int, most: int) -> Sequence[float]:
        """Seconds of passes of 0, 1, ... `most` times so many rows."""
        return self._costs.table(rows * most)[: rows * most + 1 : rows]

    def alone(self, rows: int) -> float:
        """Seconds of one pass of so many rows."""
        return float(self._costs.seconds([rows])[0])

    def reading(self, unread: Sequence[int], usual: int) -> list[float]:
        """Seconds that each request with more than `usual` unread tokens adds to a pass for all of them."""
        if max(unread) <= usual:  # so it is in nearly every step
            return [0.0] * len(unread)
        together = usual * len(unread)
        rows = together + np.maximum(np.asarray(unread) - usual, 0)
        added: list[float] = (self._costs.seconds(rows) - self._costs.seconds([together])).tolist()
        return added


def rates_of(levels: Sequence[Sequence[float]]) -> list[LevelRate]:
    """How likely the guesses at each level are right where those above were, by `DraftCosts.to_json`."""
    rates, first, other = list[LevelRate](), _PRIOR_RATE, 0.0
    for firsts, others, tries in levels:
        first = (firsts + _PRIOR * first) / (tries + _PRIOR)
        other = (others + _PRIOR * other) / (tries - firsts + _PRIOR)
        rates.append(LevelRate(first, (1 - first) * other))
    return rates


def checked_levels(told: object) -> list[list[float]]:
    """Levels as `DraftCosts.to_json` gave them; raises ValueError for impossible ones."""
    found = list[list[float]]()
    for one in bounded.rows(told, 1000):
        firsts, others, tries = bounded.row(one, 3)
        tries = bounded.real(tries, 0.0, _MOST)
        firsts = bounded.real(firsts, 0.0, tries)
        found.append([firsts, bounded.real(others, 0.0, tries - firsts), tries])
    return found
