"""What the levels of a draft's trees cost, and how often they were right, for all requests and for each.

A level is one pass of the draft and brings a token for every request whose text goes on as it guessed. So
what counts is how often the draft goes on rightly at each level, given that it was right so far. Of all that
is known before a text has begun its temperature tells most about that, so requests of about one temperature
are counted together, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from specinfer.runtime.cost_model import PassCosts
from specinfer.sampling_params import GREEDY_BELOW
from specinfer.speculate.policy.bounded import mapping, row
from specinfer.speculate.policy.level_counts import LevelCounts, LevelRate, checked_levels
from specinfer.tree.expansion import Expansion

# Temperatures up to which requests are counted together, and all above the last. Files of what was learnt
# have counts for each, so others make another version of these (policy_memory.py).
HEATS: Final = (GREEDY_BELOW, 0.5, 1.0)
_LIKE_ALL: Final = 4.0  # outcomes at a temperature that are thought to have come, as often right as all are
_LIKE_THESE: Final = 16.0  # outcomes of a request that are, as often right as those at its temperature


class LevelOutcome(NamedTuple):
    """The result of a request's guesses at one level of a tree, the root's children being level 0."""

    request_id: str
    level: int
    choice: int | None  # which of the draws below the node of the text became text: 0 the first; None: none


class DraftCosts:
    """One draft model's costs, by `costs`, and how the levels of its trees have done.

    Trees of samples have the shape of `expansion`, others at most `deepest` levels, or as many.
    """

    def __init__(self, costs: PassCosts, expansion: Expansion, deepest: int = 0) -> None:
        self._costs = costs
        self._widths = expansion.widths
        self._counts = LevelCounts(max(deepest, expansion.depth))
        self._alike = tuple(LevelCounts(self._counts.depth) for _ in range(len(HEATS) + 1))  # by temperature
        self._own: dict[str, LevelCounts] = {}  # of each request that was guessed for

    def learn(self, seen: LevelOutcome, temperature: float | None = None) -> None:
        """Count what became of guesses at a level, for all requests and for the one they were for.

        And for those of about its temperature, where that is known.
        """
        self._counts.learn(seen.level, seen.choice)
        if temperature is not None:
            self._alike[bisect_left(HEATS, temperature)].learn(seen.level, seen.choice)
        if seen.request_id not in self._own:
            self._own[seen.request_id] = LevelCounts(self._counts.depth)
        self._own[seen.request_id].learn(seen.level, seen.choice)

    def lent(self, request_id: str, temperature: float) -> tuple[int, int, int]:
        """Where what `learn` counts for a request lies, for a library that learns in its place."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = LevelCounts(self._counts.depth)
        alike = self._alike[bisect_left(HEATS, temperature)]
        return self._counts.lent(), alike.lent(), own.lent()

    @property
    def depth(self) -> int:
        """How many levels are counted."""
        return self._counts.depth

    def forget(self, request_id: str) -> None:
        """A request that ended."""
        self._own.pop(request_id, None)

    def to_json(self) -> dict[str, Any]:
        """How often the first guess and others were right at each level, and the tries."""
        return {"all": self._counts.to_json(), "alike": [counts.to_json() for counts in self._alike]}

    def recall(self, told: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave, of as many levels as there are."""
        self._counts.recall(told["all"])
        for counts, levels in zip(self._alike, told["alike"], strict=True):
            counts.recall(levels)

    def rates(self) -> Sequence[LevelRate]:
        """How likely guesses at each level are right where a text got there."""
        return self._counts.rates()

    def usual(self, level: int) -> LevelRate:
        """How likely guesses at one level are right for any request."""
        return self._counts.usual(level)

    def width(self, level: int) -> int:
        """The samples that a node at this depth gets."""
        return self._widths[min(level, len(self._widths) - 1)]

    def rate(self, level: int, request_id: str | None = None, temperature: float | None = None) -> LevelRate:
        """How likely guesses at one level are right for a request, or for any; too deep ones are the deepest.

        What came of guesses for the request itself counts beside what came of all at about its temperature,
        and that beside what came of all.
        """
        level = min(level, self._counts.depth - 1)
        usual = self.usual(level)
        if temperature is not None:
            usual = self._alike[bisect_left(HEATS, temperature)].rate(level, usual, _LIKE_ALL)
        own = None if request_id is None else self._own.get(request_id)
        return usual if own is None or own.untouched else own.rate(level, usual, _LIKE_THESE)

    def passes(self, most: int) -> Sequence[float]:
        """Seconds of passes of 0, 1, ... `most` rows."""
        return self._costs.table(most)

    def seconds(self, rows: int, most: int) -> Sequence[float]:
        """Seconds of passes of 0, 1, ... `most` times so many rows."""
        return self._costs.table(rows * most)[: rows * most + 1 : rows]

    def alone(self, rows: int) -> float:
        """Seconds of one pass of so many rows."""
        return self._costs.expected(rows)

    def reading(self, unread: Sequence[int], usual: int) -> list[float]:
        """Seconds that each request with more than `usual` unread tokens adds to a pass for all of them."""
        if max(unread) <= usual:  # so it is in nearly every step
            return [0.0] * len(unread)
        together, expected = usual * len(unread), self._costs.expected
        without = expected(together)
        return [expected(together + left - usual) - without if left > usual else 0.0 for left in unread]


def checked_draft(told: object) -> dict[str, Any]:
    """What `DraftCosts.to_json` gave, or an object with nothing; raises ValueError for impossible numbers."""
    found = mapping(told)
    alike = row(found.get("alike", [[]] * (len(HEATS) + 1)), len(HEATS) + 1)
    return {"all": checked_levels(found.get("all", [])), "alike": [checked_levels(one) for one in alike]}
