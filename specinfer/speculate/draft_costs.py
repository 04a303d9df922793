"""What the levels of a draft's trees cost, and how often they were right.

A level is one pass of the draft and brings a token for every request whose text goes on as it guessed. So
what counts is how often the draft goes on rightly at each level, given that it was right so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

import numpy as np

from specinfer.runtime.cost_model import PassCosts
from specinfer.speculate import bounded
from specinfer.tree.expansion import Expansion

_PRIOR_RATE: Final = 0.7  # of the first level, before anything was seen
_PRIOR: Final = 3.0  # guesses; a level nobody has been to is thought to be like the one above it
_MEMORY: Final = 0.97  # what a count keeps at each new outcome: the last 30 decide
_MOST: Final = 1e4  # outcomes that levels of a full batch can come to


@dataclass(slots=True)
class _Level:
    """How often the guesses at one level held the next token, fading."""

    hits: float = 0.0
    tries: float = 0.0


class DraftCosts:
    """One draft model's costs, by `costs`, and how the levels of its `expansion` have done."""

    def __init__(self, costs: PassCosts, expansion: Expansion) -> None:
        self._costs = costs
        self._levels = [_Level() for _ in expansion.widths]
        self._rates: list[float] = []  # of the levels; empty: to be computed
        self._nodes: list[int] = list(accumulate(expansion.widths, mul))  # of a request at each level

    @property
    def deepest(self) -> int:
        """The levels of a full tree."""
        return len(self._levels)

    def learn(self, level: int, hit: bool) -> None:
        """Count whether the guesses at `level`, 0 being the root's children, held the text's next token."""
        if level == 0:  # what is not tried any more is forgotten as well
            for seen in self._levels:
                seen.hits *= _MEMORY
                seen.tries *= _MEMORY
        if level < len(self._levels):
            self._levels[level].hits += hit
            self._levels[level].tries += 1
        self._rates = []

    def to_json(self) -> list[list[float]]:
        """Hits and tries of each level."""
        return [[level.hits, level.tries] for level in self._levels]

    def recall(self, levels: Sequence[Sequence[float]]) -> None:
        """Take over what `to_json` gave, of as many levels as there are."""
        for level, (hits, tries) in zip(self._levels, levels, strict=False):
            level.hits, level.tries = hits, tries
        self._rates = []

    def rates(self) -> list[float]:
        """The probability that the guesses at each level hold the next token of a text that got there."""
        if not self._rates:
            self._rates = rates_of([(level.hits, level.tries) for level in self._levels])
        return self._rates

    def nodes(self, level: int) -> int:
        """The guesses a request has at `level` of a full tree."""
        return self._nodes[level]

    def passes(self, level: int, most: int) -> Sequence[float]:
        """Seconds of the pass for `level` with 0, 1, ... `most` requests: each has a row a node above it."""
        return self.seconds(self._nodes[level - 1] if level else 1, most)

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


def rates_of(levels: Sequence[Sequence[float]]) -> list[float]:
    """How often the guesses at each level are right where those above were, by hits and tries of each."""
    rates, rate = list[float](), _PRIOR_RATE
    for hits, tries in levels:
        rate = (hits + _PRIOR * rate) / (tries + _PRIOR)
        rates.append(rate)
    return rates


def checked_levels(told: object) -> list[list[float]]:
    """Hits and tries of levels, as `DraftCosts.to_json` gave them; raises ValueError for impossible ones."""
    found = list[list[float]]()
    for one in bounded.rows(told, 1000):
        hits, tries = bounded.row(one, 2)
        tries = bounded.real(tries, 0.0, _MOST)
        found.append([bounded.real(hits, 0.0, tries), tries])
    return found
