"""What steps without guesses take, against what their passes are thought to take.

Nobody knows what a step would have taken without guesses, except from steps that had none. So now and then a
step is kept plain, and its seconds are kept as a multiple of what the cost model says of its pass. A batch of
another size has a multiple of its own, as the model may be wrong about sizes.

When the model thinks that passes are slower or quicker than they were at the last plain steps, either the
machine is, and the multiple is what it was, or passes with guesses are, and the model is wrong about others.
Plain steps tell, so then there are a few more of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

_FIRST: Final = 5  # plain steps of a batch size, before anybody guesses there
_EVERY: Final = 200  # steps, of which one is plain from then on
_SOON: Final = 8  # steps, of which one is plain where passes seem to have changed
_CHANGED: Final = 0.1  # relative
_ENOUGH: Final = 3  # plain steps since passes have changed
_KEPT: Final = 5  # multiples, of which the median counts


@dataclass(slots=True)
class _Size:
    """What was seen of batches of about one size."""

    seen: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_KEPT)
    )  # how slow passes were thought to be, and the multiple
    plain: int = 0  # steps
    since: int = 0  # steps, since the last plain one
    asked_at: float = 0.0  # the slowness of `enough` and `multiple`; 0: of none
    enough: bool = False  # whether enough was seen since passes have been as slow
    multiple: float = 1.0

    def look_up(self, slowness: float) -> _Size:
        """This, with `enough` and `multiple` of passes as slow as that; at least one step must be seen."""
        if self.asked_at != slowness:  # it stays the same for steps, and is asked in every one
            last = takewhile(lambda seen: abs(slowness / seen[0] - 1) <= _CHANGED, reversed(self.seen))
            fresh = [multiple for _, multiple in last]
            known = _median(multiple for _, multiple in self.seen)
            self.enough = len(fresh) >= _ENOUGH
            self.multiple = _median(fresh) if self.enough else min([known, *fresh])
            self.asked_at = slowness
        return self


class PlainSteps:
    """Multiples of the cost model's seconds, by the size of the batch in powers of two.

    `slowness` is how slow the model thinks passes are now, as a multiple of the curve's.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def due(self, requests: int, slowness: float) -> bool:
        """Whether a step of so many requests should be plain, as too little is known of such steps."""
        size = self._of(requests)
        if size.plain < _FIRST or size.since >= _EVERY:
            return True
        return size.since >= _SOON and bool(size.seen) and not size.look_up(slowness).enough

    def multiple(self, requests: int, slowness: float) -> float:
        """The median for batches of about this size, or of the nearest size that was seen; at first 1.

        Where passes have changed and few plain steps have been seen since, the least it may be by now.
        """
        wanted = requests.bit_length()
        size = self._sizes.get(wanted)
        if size is None or not size.seen:
            others = {number: other for number, other in self._sizes.items() if other.seen}
            if not others:
                return 1.0
            size = others[min(others, key=lambda number: abs(number - wanted))]
        return size.look_up(slowness).multiple

    def guessed(self, requests: int) -> None:
        """Count a step that had guesses."""
        self._of(requests).since += 1

    def learn(self, requests: int, slowness: float, multiple: float) -> None:
        """Count a plain step; a multiple that is no positive number is no use, and the step counts."""
        size = self._of(requests)
        size.plain += 1
        size.since = 0
        if 0 < multiple < math.inf:
            size.seen.append((slowness, multiple))
            size.asked_at = 0.0

    def _of(self, requests: int) -> _Size:
        size = self._sizes.get(requests.bit_length())
        if size is None:
            size = self._sizes[requests.bit_length()] = _Size()
        return size


def _median(values: Iterable[float]) -> float:
    """The lower one of two: what disturbs a step only makes it longer."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
