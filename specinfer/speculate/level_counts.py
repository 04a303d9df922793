"""How often guesses at each level of a draft's trees held the next token, where those above them did.

First guesses below a node are told from others, as each of the others costs the target a row more.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class LevelCounts:
    """The counts of so many levels, fading."""

    def __init__(self, depth: int) -> None:
        # By level: how often the first guess held the next token, or another one, and the tries.
        self._firsts, self._others, self._tries = ([0.0] * depth for _ in range(3))
        self._rates: list[LevelRate] = []  # of the first levels, as far as somebody has asked

    @property
    def depth(self) -> int:
        """How many levels are counted."""
        return len(self._tries)

    def learn(self, level: int, choice: int | None) -> None:
        """Count which of the guesses at `level`, 0 being the root's children, was right; None: none was."""
        if level == 0:  # what is not tried any more is forgotten as well
            self._firsts = [count * _MEMORY for count in self._firsts]
            self._others = [count * _MEMORY for count in self._others]
            self._tries = [count * _MEMORY for count in self._tries]
        if level < len(self._tries):
            self._firsts[level] += choice == 0
            self._others[level] += bool(choice)
            self._tries[level] += 1
        self._rates = []

    def rates(self) -> Sequence[LevelRate]:
        """How likely guesses at each level are right where a text got there."""
        return self._first_rates(self.depth)

    def usual(self, level: int) -> LevelRate:
        """The same of one level; of too deep ones that of the deepest."""
        level = min(level, self.depth - 1)
        return self._first_rates(level + 1)[level]

    def rate(self, level: int, usual: LevelRate, thought: float) -> LevelRate:
        """The rate of one level, if `thought` tries before those counted came out as `usual` has it."""
        firsts, tries = self._firsts[level], self._tries[level]
        missed = 1 - usual.first
        behind = usual.other / missed if missed > 0 else 0.0
        first = (firsts + thought * usual.first) / (tries + thought)
        other = (self._others[level] + thought * behind) / (tries - firsts + thought)
        return LevelRate(first, (1 - first) * other)

    def to_json(self) -> list[list[float]]:
        """How often the first guess and others were right at each level, and the tries."""
        return [[*level] for level in zip(self._firsts, self._others, self._tries, strict=True)]

    def recall(self, levels: Sequence[Sequence[float]]) -> None:
        """Take over what `to_json` gave, of as many levels as there are."""
        for level, counts in enumerate(levels[: self.depth]):
            self._firsts[level], self._others[level], self._tries[level] = counts
        self._rates = []

    def _first_rates(self, count: int) -> list[LevelRate]:
        """Of at least so many levels; one is thought to be like the one above it."""
        rates = self._rates
        while len(rates) < count:
            above = rates[-1] if rates else LevelRate(_FIRST, 0.0)
            rates.append(self.rate(len(rates), above, _THOUGHT))
        return rates


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
