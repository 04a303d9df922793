"""PrefixIndex: published blocks by the text before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

_SEARCHED: Final = 64  # newest blocks behind one text that are compared; thousands may follow a system prompt


class Follower(NamedTuple):
    """A published block whose text begins like another one."""

    block: int
    token_ids: Sequence[int]  # of the block
    alike: int  # leading tokens that both texts have


class PrefixIndex:
    """Finds the published block that begins like a text, and so the token at which texts part."""

    def __init__(self) -> None:
        self._following: dict[bytes, dict[int, Sequence[int]]] = {}  # hash of the text before -> its blocks
        self._before: dict[int, bytes] = {}  # block -> hash of the text before it

    def add(self, block: int, before: bytes, token_ids: Sequence[int]) -> None:
        """Add a block that is published."""
        self._before[block] = before
        self._following.setdefault(before, {})[block] = token_ids

    def drop(self, block: int) -> None:
        """Remove a block that was evicted; other numbers have no effect."""
        if (before := self._before.pop(block, None)) is not None:
            following = self._following[before]
            del following[block]
            if not following:
                del self._following[before]

    def nearest(self, before: bytes, token_ids: Sequence[int]) -> Follower | None:
        """Return the block behind the text with hash `before` that begins most like `token_ids`."""
        following = self._following.get(before, {})
        return max(
            (
                Follower(block, own, common_length(own, token_ids))
                for block, own in islice(reversed(following.items()), _SEARCHED)
            ),
            key=lambda one: one.alike,
            default=None,
        )

    @property
    def blocks(self) -> set[int]:
        """All blocks."""
        return {*self._before}


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the number of tokens, or of characters, with which both texts begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))
