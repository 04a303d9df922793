"""How often guesses like this one became text.

A speculator says how sure it is of a token given the tokens before it (`Draw.confidence`): a draft model its
own probability, a text speculator how long a match it found. What that is worth is counted here, for each
speculator, in steps of one in log-odds, apart for its first choice and its others. Old counts fade, so the
rates follow the texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from specinfer.speculate.policy import bounded
from specinfer.tree import Draw, TokenTree

_LEVELS: Final = 6  # log-odds are rounded to whole numbers from -6 to 6: probabilities of 0.2% to 99.8%
_LEAST: Final = 1 / (1 + math.exp(_LEVELS + 0.5))  # what is less likely has the lowest level
_BELIEVED: Final = {level: 1 / (1 + math.exp(-level)) for level in range(-_LEVELS, _LEVELS + 1)}
PRIOR: Final = 4.0  # guesses: until more were seen, a speculator is believed
_MEMORY: Final = 0.995  # what a count keeps at each new guess: the last 200 decide
_MOST: Final = PRIOR + 1 / (1 - _MEMORY)  # that a count can come to
_MOST_COUNTS: Final = 4096


@dataclass(slots=True)
class _Count:
    """What became of the guesses of one kind, fading."""

    accepted: float
    seen: float = PRIOR

    def add(self, accepted: bool) -> None:
        self.accepted = _MEMORY * self.accepted + accepted
        self.seen = _MEMORY * self.seen + 1


class Calibration:
    """Counts what became of draws, and from that says what will become of others."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, bool], _Count] = {}

    def rates(self, draws: Sequence[Draw]) -> list[float]:
        """How often guesses like each of these became text where their parent did, [len(draws)].

        Of a speculator's draws below a node, the first is the first of them here.
        """
        counts, rates = self._counts, list[float]()
        seen: set[tuple[int, str]] = set()
        for draw in draws:
            speculator, level = draw.speculator, _level(draw.confidence)
            place = (draw.parent, speculator)
            count = counts.get((speculator, level, place not in seen))
            rates.append(_BELIEVED[level] if count is None else count.accepted / count.seen)
            seen.add(place)
        return rates

    def node_rates(self, tree: TokenTree) -> list[float]:
        """The probability of every node to become text if its parent does, [num_nodes]; the root's is 1.

        Of several speculators that propose a node the most likely one is believed.
        """
        if tree.num_nodes == 1:
            return [1.0]
        rates = [0.0] * tree.num_nodes
        for draw, rate in zip(tree.draws, self.rates(tree.draws), strict=True):
            if rate > rates[draw.node]:
                rates[draw.node] = rate
        rates[0] = 1.0
        return rates

    def probabilities(self, tree: TokenTree) -> list[float]:
        """The probability of every node to become text: its path's rates multiplied, [num_nodes]."""
        return along_paths(self.node_rates(tree), tree.parents)

    def learn(self, below: Sequence[Draw], accepted: int | None) -> None:
        """Count the draws below one node of the text, of which those at node `accepted` became text."""
        seen: set[str] = set()
        for draw in below:
            level = _level(draw.confidence)
            key = (draw.speculator, level, draw.speculator not in seen)
            count = self._counts.get(key)
            if count is None:
                count = self._counts[key] = _Count(PRIOR * _BELIEVED[level])
            count.add(draw.node == accepted)
            seen.add(draw.speculator)

    def to_json(self) -> list[list[Any]]:
        """Every count: speculator, level, whether of first choices, accepted, seen."""
        return [[*key, count.accepted, count.seen] for key, count in self._counts.items()]

    def recall(self, told: object) -> None:
        """Take over what `to_json` gave; raises ValueError for numbers it cannot have given."""
        counts = dict[tuple[str, int, bool], _Count]()
        for one in bounded.rows(told, _MOST_COUNTS):
            speculator, level, first, accepted, seen = bounded.row(one, 5)
            key = (bounded.name(speculator), bounded.whole(level, -_LEVELS, _LEVELS), first is True)
            seen = bounded.real(seen, PRIOR, _MOST)
            counts[key] = _Count(bounded.real(accepted, 0.0, seen), seen)
        self._counts = counts

    def put(self, speculator: str, level: int, first: bool, accepted: float, seen: float) -> None:
        """Have one count be this."""
        self._counts[speculator, level, first] = _Count(accepted, seen)


def levels() -> range:
    """The log-odds that confidences are rounded to, ascending."""
    return range(-_LEVELS, _LEVELS + 1)


def rate_of_level(level: int) -> float:
    """What a confidence of so many log-odds says."""
    return _BELIEVED[level]


def along_paths(rates: Sequence[float], parents: Sequence[int]) -> list[float]:
    """The rates from below the root down to each node multiplied, [num_nodes]; the root's is 1."""
    products = [1.0]
    for node in range(1, len(parents)):
        products.append(rates[node] * products[parents[node]])
    return products


def _level(confidence: float) -> int:
    if _LEAST < confidence < 1 - _LEAST:
        return round(math.log(confidence / (1 - confidence)))
    return _LEVELS if confidence > 0.5 else -_LEVELS  # nor is it sure if it is no number
