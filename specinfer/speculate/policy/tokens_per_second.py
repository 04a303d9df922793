"""What to add to a step so that it makes the most tokens per second.

With no arrays, as mostly there are few candidates; and with no loop in Python, as there may be many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate
from operator import add, truediv


def fastest(probabilities: Sequence[float], tokens: float, seconds: Iterable[float]) -> list[bool]:
    """Which of some candidates make a step's tokens per second highest, [n]; fewer at the same speed.

    Args:
        probabilities: the tokens each is expected to bring, [n]; equal ones are chosen in their order.
        tokens: expected of the step without any of them.
        seconds: of the step with 0, 1, ... of them, [n + 1] or more.
    """
    numbers = range(len(probabilities))
    order = sorted(numbers, key=probabilities.__getitem__, reverse=True)
    count = how_many(map(probabilities.__getitem__, order), tokens, seconds)
    return [*map(frozenset(order[:count]).__contains__, numbers)]


def how_many(probabilities: Iterable[float], tokens: float, seconds: Iterable[float]) -> int:
    """How many of the first candidates: as `fastest`, of candidates that come likeliest first."""
    expected = map(tokens.__add__, accumulate(probabilities, initial=0.0))
    speeds = [*map(truediv, expected, seconds)]
    return speeds.index(max(speeds))


def total(values: Iterable[float]) -> float:
    """Their sum, one after the other as the library adds them, which `sum` of newer Pythons does not."""
    return reduce(add, values, 0.0)
