"""Routing: which replica a session belongs to, or a prompt that begins like others; no torch, no process.

Replicas stand on a ring of hashes, each at many places, and so do sessions. A session belongs to the first
replica behind its place, where its earlier turns are in the cache. While a replica is away its sessions
belong to those behind it, and all others stay where they are; when it is back, they are back, too.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_PLACES: Final = 64  # of each replica on the ring
_BEGINNING: Final = 64  # tokens of a prompt, four usual blocks: a later turn of a talk begins with the same
_MOST_LOAD: Final = 1.5  # times the mean


def key_of(session: str, prompt: Sequence[int], salt: str | None) -> int:
    """The place on the ring of a session, or where there is none of a prompt's beginning under its salt."""
    if session:
        return _hash(b"session " + session.encode("utf-8", "surrogatepass"))
    beginning = " ".join(map(str, prompt[:_BEGINNING]))  # numbers of any size: they may be no tokens
    return _hash(f"prompt {salt or ''} {beginning}".encode("utf-8", "surrogatepass"))


class Ring:
    """The places of so many replicas, numbered from 0."""

    def __init__(self, replicas: int) -> None:
        places = [(_hash(f"{one} at {n}".encode()), one) for one in range(replicas) for n in range(_PLACES)]
        self._places = sorted(places)

    def order(self, key: int) -> Iterator[int]:
        """All replicas, in the order in which they stand behind a place."""
        first = bisect_left(self._places, (key, -1))
        behind = [one for _, one in self._places[first:] + self._places[:first]]
        return iter(dict.fromkeys(behind))

    def choose(self, key: int, loads: Mapping[int, int]) -> int:
        """The replica of a work with this key: of those in `loads` the first behind it with room.

        `loads` has the works of each replica that may be chosen, of one at least. With one work more none may
        have above 1.5 times their mean.
        """
        most = math.ceil(_MOST_LOAD * (sum(loads.values()) + 1) / len(loads))
        return next(one for one in self.order(key) if one in loads and loads[one] < most)


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
