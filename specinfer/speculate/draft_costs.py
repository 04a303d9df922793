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
from numpy.typing import NDArray

from specinfer.runtime.cost_curve import CostCurve
from specinfer.tree.expansion import Expansion

_PRIOR_RATE: Final = 0.7  # of the first level, before anything was seen
_PRIOR: Final = 8.0  # guesses; a level nobody has been to is thought to be like the one above it
_MEMORY: Final = 0.99  # what a count keeps at each new outcome


@dataclass(slots=True)
class _Level:
    """How often the guesses at one level held the next token, fading."""

    hits: float = 0.0
    tries: float = 0.0


class DraftCosts:
    """One draft model's costs, by `curve`, and how the levels of its `expansion` have done."""

    def __init__(self, curve: CostCurve, expansion: Expansion) -> None:
        self._curve = curve
        self._levels = [_Level() for _ in expansion.widths]
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

    def rates(self) -> list[float]:
        """The probability that the guesses at each level hold the next token of a text that got there."""
        rates = [_PRIOR_RATE]
        for level in self._levels:
            rates.append((level.hits + _PRIOR * rates[-1]) / (level.tries + _PRIOR))
        return rates[1:]

    def nodes(self, level: int) -> int:
        """The guesses a request has at `level` of a full tree."""
        return self._nodes[level]

    def passes(self, level: int, requests: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of the pass for `level` with so many requests in it: a row for each node above it."""
        return self._curve.seconds(np.asarray(requests) * (self._nodes[level - 1] if level else 1))

    def reading(self, unread: NDArray[np.int64], usual: int) -> NDArray[np.float64]:
        """Seconds that each request with more than `usual` unread tokens adds to a pass for all of them."""
        together = usual * len(unread)
        return self._curve.seconds(together + unread - usual) - self._curve.seconds([together])
