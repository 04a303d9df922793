"""What a draft would have guessed at places where it was not asked, found out when it reads them.

    text     ..  5   6   7   8   9    5 was the last root at which it was asked, 9 is the root now
    rows             6   7   8   9    read in one pass; of those before the root it is known what came
    right            yes yes no
    levels           0   0   0        of a tree at this place: its children
                         1   1        of one at the place before: below the guess that was right
                             2        of one at 6

Each place could have been a root: its children are drawn as they would have been, and the token that came is
one of them or none. Below a guess that was right stands the next place, so a level is tried where all above
it held the text, as in trees that were grown.

Of levels with more draws below a node than roots have, and of those below them, nothing is told. Where a
request's parameters change logits nothing is, as what they would have changed there is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.plan import PlanEntry
from specinfer.speculate.drafts.draws import Site
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.speculator import LevelOutcome

_ROOM: Final = 1 << 30  # nodes of a tree that nobody verifies
# Of one pass: each is a row of the output layer, and of a level's outcomes the last 30 or so decide.
MOST_PLACES: Final = 32


class Hindsight:
    """The places of texts at which one draft was not asked; `shape` says how it would have drawn there."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._name = name
        self._shape = shape
        self._since: dict[str, int] = {}  # request -> the first root at which it was not asked
        self._left = 0  # places that there may yet be in the pass
        self._places = range(0)  # of the text that was looked at last
        self._seen: list[tuple[PlanEntry, list[Site]]] = []  # of the pass, by text

    def begin(self, entries: Sequence[PlanEntry]) -> None:
        """Open a step; of a text that is new here nothing counts that is there already, nor what comes next.

        That is the first token of an answer, for which nobody guesses.
        """
        self._seen, self._left = [], MOST_PLACES
        for entry in entries:
            self._since.setdefault(entry.request.request_id, len(entry.token_ids))

    def look_at(self, entry: PlanEntry, start: int, end: int) -> int:
        """How many of the rows at positions start..end-1 to look at: the last ones.

        None where it is not known what comes behind the last one, and before a text may end (`min_tokens`).
        """
        request = entry.request
        free = len(request.prompt_token_ids) + request.params.min_tokens - 1
        first = max(start, self._since[request.request_id], free, end - self._left)
        known = end < len(entry.token_ids) and entry.active_processors is None
        self._places = range(first, end) if known else range(0)
        if self._places:
            self._left -= len(self._places)
            self._since[request.request_id] = end
        return len(self._places)

    def sites(self, entry: PlanEntry) -> list[Site]:
        """The rows of the text that was looked at last, as roots whose children are drawn."""
        if not self._places:  # so it is in nearly every step
            return []
        roots = [replace(entry, end=place + 1, max_nodes=_ROOM) for place in self._places]
        sites = [Growth.shaped(one, self._name, self._shape).sites(self._shape)[0] for one in roots]
        self._seen.append((entry, sites))
        self._places = range(0)
        return sites

    def outcomes(self) -> list[LevelOutcome]:
        """What came of the draws at all places of the pass, in the order of their texts."""
        told = list[LevelOutcome]()
        for entry, sites in self._seen:
            request_id = entry.request.request_id
            levels, right = self._levels(entry), 0  # right: so many draws before it
            for site in sites:
                if not site.builder.draws:  # as in a tree: nothing was tried
                    right = 0
                    continue
                choice = _choice(site, entry.token_ids[site.position])
                told += [LevelOutcome(request_id, level, choice) for level in range(min(right + 1, levels))]
                right = 0 if choice is None else right + 1
        return told

    def asked(self, request_id: str, root: int) -> None:
        """The draft was asked in this step; the next one has its root at position `root`."""
        self._since[request_id] = root

    def forget(self, request_id: str) -> None:
        """A request that ended."""
        self._since.pop(request_id, None)

    def _levels(self, entry: PlanEntry) -> int:
        """How many levels can be told of: those that have no more draws below a node than roots."""
        request = entry.request
        widths = [self._shape.width(request, level) for level in range(self._shape.depth(request))]
        return next((level for level, width in enumerate(widths) if width > widths[0]), len(widths))


def _choice(site: Site, token: int) -> int | None:
    """Which of the draws at a site is this token."""
    builder = site.builder
    drawn = [builder.token_ids[draw.node] for draw in builder.draws]
    return drawn.index(token) if token in drawn else None
