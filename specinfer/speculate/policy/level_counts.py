"""How often guesses at each level of a draft's trees held the next token, where those above them did.

First guesses below a node are told from others, as each of the others costs the target a row more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from specinfer.speculate.policy import bounded

_FIRST: Final = 0.7  # rate of the first guess, before anything was seen
_THOUGHT: Final = 3.0  # guesses; a level nobody has been to is thought to be like the one above it
_MEMORY: Final = 0.97  # what a count keeps at each new outcome: the last 30 decide
_ROUNDING: Final = 1e-12  # of the tries
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
        # How often the first guess of each level held the next token, how often another one, and the tries.
        self._counts = array("d", bytes(8 * 3 * depth))
        self._depth = depth
        self._rates: list[LevelRate] = []  # of the first levels, as far as somebody has asked

    @property
    def depth(self) -> int:
        """How many levels are counted."""
        return self._depth

    @property
    def untouched(self) -> bool:
        """Whether nothing was learnt."""
        return not any(self._counts)

    def lent(self) -> int:
        """Where they lie, as cpu/guesses.h has them, for a library that learns in their place."""
        self._rates = []
        return self._counts.buffer_info()[0]

    def learn(self, level: int, choice: int | None) -> None:
        """Count which of the guesses at `level`, 0 being the root's children, was right; None: none was."""
        counts, depth = self._counts, self._depth
        if level == 0:  # what is not tried any more is forgotten as well
            for i, count in enumerate(counts):
                counts[i] = count * _MEMORY
        if level < depth:
            counts[level] += choice == 0
            counts[depth + level] += bool(choice)
            counts[2 * depth + level] += 1
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
        counts, depth = self._counts, self._depth
        firsts, others, tries = counts[level], counts[depth + level], counts[2 * depth + level]
        missed = 1 - usual.first
        behind = usual.other / missed if missed > 0 else 0.0
        first = (firsts + thought * usual.first) / (tries + thought)
        other = (others + thought * behind) / (tries - firsts + thought)
        return LevelRate(first, (1 - first) * other)

    def to_json(self) -> list[list[float]]:
        """How often the first guess and others were right at each level, and the tries."""
        return [self._counts[level :: self._depth].tolist() for level in range(self._depth)]

    def recall(self, levels: Sequence[Sequence[float]]) -> None:
        """Take over what `to_json` gave, of as many levels as there are."""
        depth = self._depth
        for level, (firsts, others, tries) in enumerate(levels[:depth]):
            for at, count in ((level, firsts), (depth + level, others), (2 * depth + level, tries)):
                self._counts[at] = count
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
        left = tries - firsts  # each count fades by itself, so where nothing missed `others` may round higher
        others = bounded.real(others, 0.0, left + _ROUNDING * tries)
        found.append([firsts, min(others, left), tries])
    return found
