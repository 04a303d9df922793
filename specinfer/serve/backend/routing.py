"""Consistent hashing of sessions and prompt prefixes to replicas, with bounded loads.

Each replica has 64 positions on a ring of hashes, and each session has one. A session belongs to the first
replica after its position, whose cache then holds its earlier turns. While a replica is down, its sessions
belong to the next replicas on the ring and all others stay; when it is up again, its sessions return.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_POSITIONS: Final = 64  # per replica on the ring
_PREFIX: Final = 64  # prompt tokens in the key, four KV blocks; later chat turns share them
_MAX_LOAD: Final = 1.5  # times the mean load


def key_of(session: str, prompt: Sequence[int], salt: str | None) -> int:
    """Position on the ring, from the session's name if given, else from the prompt's prefix and salt."""
    if session:
        return _hash(b"session " + session.encode("utf-8", "surrogatepass"))
    prefix = " ".join(map(str, prompt[:_PREFIX]))  # as text: unchecked token ids may have any size
    return _hash(f"prompt {salt or ''} {prefix}".encode("utf-8", "surrogatepass"))


class Ring:
    """Hash ring of replicas, numbered from 0."""

    def __init__(self, replicas: int) -> None:
        self._positions = sorted(
            (_hash(f"{one} at {n}".encode()), one) for one in range(replicas) for n in range(_POSITIONS)
        )

    def order(self, key: int) -> Iterator[int]:
        """All replicas, in ring order after the position `key`."""
        first = bisect_left(self._positions, (key, -1))
        after = [one for _, one in self._positions[first:] + self._positions[:first]]
        return iter(dict.fromkeys(after))

    def choose(self, key: int, loads: Mapping[int, int]) -> int:
        """First replica after `key` that has room for one more work.

        `loads` maps each candidate to its number of works; it may not be empty. With the new work included,
        no replica may have more than 1.5 times the candidates' mean load, rounded up.
        """
        max_load = math.ceil(_MAX_LOAD * (sum(loads.values()) + 1) / len(loads))
        return next(one for one in self.order(key) if one in loads and loads[one] < max_load)


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
