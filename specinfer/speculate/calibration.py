"""How often guesses like this one became text.

A speculator says how sure it is of a token given the tokens before it (`Draw.confidence`): a draft model its
own probability, a text speculator how long a match it found. What that is worth is counted here, for each
speculator, in steps of one in log-odds, apart for its first choice and its others. Old counts fade, so the
rates follow the texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from specinfer.tree import Draw, TokenTree

SUREST_MATCH: Final = 16  # tokens; more make a guess no surer
_LEVELS: Final = 6  # log-odds are rounded to whole numbers from -6 to 6: probabilities of 0.2% to 99.8%
_PRIOR: Final = 4.0  # guesses: until more were seen, a speculator is believed
_MEMORY: Final = 0.995  # what a count keeps at each new guess: the last 200 decide


@dataclass(slots=True)
class _Count:
    """What became of the guesses of one kind, fading."""

    accepted: float
    seen: float = _PRIOR

    def rate(self) -> float:
        return self.accepted / self.seen

    def add(self, accepted: bool) -> None:
        self.accepted = _MEMORY * self.accepted + accepted
        self.seen = _MEMORY * self.seen + 1


class Calibration:
    """Counts what became of draws, and from that says what will become of others."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, bool], _Count] = {}

    def probabilities(self, tree: TokenTree) -> list[float]:
        """The probability of every node to become text: its path's rates multiplied, [num_nodes].

        The root's is 1. Of several speculators that propose a node the most likely one is believed.
        """
        probabilities = [0.0] * tree.num_nodes
        for draw, first in _ranked(tree.draws):
            rate = self._count(draw, first).rate()
            if rate > probabilities[draw.node]:
                probabilities[draw.node] = rate
        probabilities[0] = 1.0
        for node in range(1, tree.num_nodes):
            probabilities[node] *= probabilities[tree.parents[node]]
        return probabilities

    def learn(self, below: Sequence[Draw], accepted: int | None) -> None:
        """Count the draws below one node of the text, of which those at node `accepted` became text."""
        for draw, first in _ranked(below):
            self._count(draw, first).add(draw.node == accepted)

    def _count(self, draw: Draw, first: bool) -> _Count:
        level = _level(draw.confidence)
        key = (draw.speculator, level, first)
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = _Count(_PRIOR / (1 + math.exp(-level)))
        return count


def match_confidence(tokens: int) -> float:
    """How sure to be of a token that followed before, where the last `tokens` tokens were the same."""
    return 1 - 0.5 ** min(tokens, SUREST_MATCH)


def _level(confidence: float) -> int:
    if not 0 < confidence < 1:  # nor if it is no number
        return _LEVELS if confidence >= 1 else -_LEVELS
    return max(-_LEVELS, min(_LEVELS, round(math.log(confidence / (1 - confidence)))))


def _ranked(draws: Sequence[Draw]) -> Iterator[tuple[Draw, bool]]:
    """Each draw, and whether it is its speculator's first below that node."""
    seen: set[tuple[int, str]] = set()
    for draw in draws:
        place = (draw.parent, draw.speculator)
        yield draw, place not in seen
        seen.add(place)
