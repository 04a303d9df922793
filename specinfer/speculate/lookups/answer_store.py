"""Texts of finished requests, kept apart by cache key, bounded together."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specinfer.errors import ensure
from specinfer.kernels.library import Library
from specinfer.speculate.lookups.text_index import LENGTHS, TextIndex

_KEY_BYTES: Final = 256  # of the tables, for each key; a key's own bytes come on top
_TEXT_BYTES: Final = 16  # of the tables, for each text
_TOKEN_BYTES: Final = 64  # more than a token takes
_STRETCHES: Final = 8  # at least, of a full memory: what leaves at once is an eighth of it


@dataclass(frozen=True, slots=True, eq=False)
class _Shelf:
    """The texts of one key."""

    key: str | None
    texts: TextIndex

    @property
    def num_bytes(self) -> int:
        return _key_bytes(self.key) + self.texts.num_bytes + _TEXT_BYTES * self.texts.num_texts


class AnswerStore:
    """One TextIndex per cache key; the oldest texts of all keys leave when `memory` bytes are full.

    A key's texts lie in an index of their own, so a search in one key cannot meet a text of another. Room is
    made before a text is added, so the bound holds at every moment.
    """

    def __init__(self, memory: int, library: Library, lengths: Sequence[int] = LENGTHS) -> None:
        """`lengths` are those of the n-grams that can be looked up."""
        self._memory = memory  # bytes of all keys together
        self._library = library
        self._lengths = lengths
        self._num_bytes = 0
        self._longest_stretch = memory // (_STRETCHES * _TOKEN_BYTES)
        self._shelves: dict[str | None, _Shelf] = {}
        self._ages: list[_Shelf] = []  # whose texts came when, oldest first

    @property
    def num_bytes(self) -> int:
        """The memory of all that is held."""
        return self._num_bytes

    def add(self, key: str | None, text: Sequence[int]) -> None:
        """Keep a text under `key`; of one that does not fit into the memory alone, the end that does."""
        room = self._memory - _key_bytes(key) - _TEXT_BYTES
        fitting = bisect_right(range(len(text) + 1), room, key=self._new_index().bytes_with) - 1
        if fitting < 1:
            return
        while self._bytes_with(key, fitting) > self._memory:
            self._drop_oldest()
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(key, self._new_index())
            self._num_bytes += shelf.num_bytes
        self._num_bytes -= shelf.num_bytes
        shelf.texts.extend(text[len(text) - fitting :])
        shelf.texts.close_text()
        self._num_bytes += shelf.num_bytes
        self._ages.append(shelf)

    def of(self, key: str | None) -> TextIndex | None:
        """The texts kept under `key`; None when there are none."""
        shelf = self._shelves.get(key)
        return None if shelf is None else shelf.texts

    def check_integrity(self) -> None:
        """Raise IntegrityError when the sums or an index are wrong, or the memory is overdrawn."""
        held = sum(shelf.num_bytes for shelf in self._shelves.values())
        ensure(self._num_bytes == held, f"{self._num_bytes} bytes are counted, {held} held")
        ensure(held <= self._memory, f"{held} bytes in a memory of {self._memory}")
        for key, shelf in self._shelves.items():
            ensure(shelf.key == key, f"the shelf of key {shelf.key!r} stands under {key!r}")
            known = self._ages.count(shelf)
            ensure(shelf.texts.num_texts == known > 0, f"key {key!r} holds texts of no age")
            shelf.texts.check_integrity()
        ensure(set(self._ages) == set(self._shelves.values()), "each key has texts, each text has a key")

    def _new_index(self) -> TextIndex:
        return TextIndex(self._library, self._lengths, longest_stretch=self._longest_stretch)

    def _bytes_with(self, key: str | None, count: int) -> int:
        """The bytes at most of all keys when a text of `count` tokens is added to this one."""
        shelf = self._shelves.get(key)
        if shelf is None:
            added = _key_bytes(key) + self._new_index().bytes_with(count)
        else:
            added = shelf.texts.bytes_with(count) - shelf.texts.num_bytes
        return self._num_bytes + added + _TEXT_BYTES

    def _drop_oldest(self) -> None:
        shelf = self._ages.pop(0)
        self._num_bytes -= shelf.num_bytes
        shelf.texts.drop_oldest_text()
        if shelf.texts.num_texts:
            self._num_bytes += shelf.num_bytes
        else:
            del self._shelves[shelf.key]


def _key_bytes(key: str | None) -> int:
    return _KEY_BYTES + sys.getsizeof(key)
