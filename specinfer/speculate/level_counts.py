"""How often guesses at each level of a draft's trees held the next token, where those above them did.

First guesses below a node are told from others, as each of the others costs the target a row more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from specinfer.speculate import bounded

_FIRST: Final = 0.7  # rate of the first guess, before anything was seen
_THOUGHT: Final = 3.0  # guesses; a level nobody has been to is thought to be like the one above it
_MEMORY: Final = 0.97  # what a count keeps at each new outcome: the last 30 decide
_MOST: Final = 1e4  # outcomes that levels of a full batch can come to


class LevelRate(NamedTuple):
    """How likely the first guess below a node of the text is right, and one of the others."""

    first: float
    other: float

    @property
    def any(self) -> float:
        """How likely one of all is."""
        return self.first + self.other


@dataclass(slots=True)
class _Level:
    """How often the guesses at one level held the next token, fading."""

    firsts: float = 0.0  # as the first of them
    others: float = 0.0  # as another
    tries: float = 0.0

    def rate(self, usual: LevelRate, thought: float) -> LevelRate:
        """The rate, if `thought` tries before these came out as `usual` has it."""
        missed = 1 - usual.first
        behind = usual.other / missed if missed > 0 else 0.0
        first = (self.firsts + thought * usual.first) / (self.tries + thought)
        other = (self.others + thought * behind) / (self.tries - self.firsts + thought)
        return LevelRate(first, (1 - first) * other)


class LevelCounts:
    """The counts of so many levels."""

    def __init__(self, depth: int) -> None:
        self._levels = [_Level() for _ in range(depth)]
        self._rates: list[LevelRate] = []  # of the levels; empty: to be computed

    @property
    def depth(self) -> int:
        """How many levels are counted."""
        return len(self._levels)

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

    def rates(self) -> Sequence[LevelRate]:
        """How likely guesses at each level are right where a text got there."""
        if not self._rates:
            above = LevelRate(_FIRST, 0.0)
            for level in self._levels:
                above = level.rate(above, _THOUGHT)
                self._rates.append(above)
        return self._rates

    def rate(self, level: int, usual: LevelRate, thought: float) -> LevelRate:
        """The rate of one level, if `thought` tries before those counted came out as `usual` has it."""
        return self._levels[level].rate(usual, thought)

    def to_json(self) -> list[list[float]]:
        """How often the first guess and others were right at each level, and the tries."""
        return [[level.firsts, level.others, level.tries] for level in self._levels]

    def recall(self, levels: Sequence[Sequence[float]]) -> None:
        """Take over what `to_json` gave, of as many levels as there are."""
        for level, (firsts, others, tries) in zip(self._levels, levels, strict=False):
            level.firsts, level.others, level.tries = firsts, others, tries
        self._rates = []


def rates_of(levels: Sequence[Sequence[float]]) -> Sequence[LevelRate]:
    """The rates of counts as `LevelCounts.to_json` gave them."""
    counts = LevelCounts(len(levels))
    counts.recall(levels)
    return counts.rates()


def checked_levels(told: object) -> list[list[float]]:
    """Levels as `LevelCounts.to_json` gave them; raises ValueError for impossible ones."""
    found = list[list[float]]()
    for one in bounded.rows(told, 1000):
        firsts, others, tries = bounded.row(one, 3)
        tries = bounded.real(tries, 0.0, _MOST)
        firsts = bounded.real(firsts, 0.0, tries)
        found.append([firsts, bounded.real(others, 0.0, tries - firsts), tries])
    return found
