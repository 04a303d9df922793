"""AnswerStore: texts of finished requests, separate for each cache key, within one memory limit."""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.text_index import LENGTHS, TextIndex

_KEY_BYTES: Final = 256  # tables of each key, in addition to the key's bytes
_TEXT_BYTES: Final = 16  # tables of each text
_TOKEN_BYTES: Final = 64  # upper bound per token
_MIN_SEGMENTS: Final = 8  # minimum number in a full memory, so at most an eighth is dropped at once


class AnswerStore:
    """One TextIndex per cache key; the oldest texts of all keys are dropped to stay within `memory` bytes.

    Each key has its own index, so a search cannot find a text of another key. Memory is freed before a text
    is added, so the limit always holds.
    """

    def __init__(self, memory: int, library: Library, lengths: Sequence[int] = LENGTHS) -> None:
        """Make an empty store; `lengths` are those of the indexed n-grams."""
        self._memory = memory  # maximum bytes of all keys together
        self._library = library
        self._lengths = lengths
        self._num_bytes = 0  # of all texts
        self._max_segment = memory // (_MIN_SEGMENTS * _TOKEN_BYTES)
        self._by_key: dict[str | None, TextIndex] = {}
        self._ages: list[str | None] = []  # the key of each text, oldest first

    def add(self, key: str | None, text: Sequence[int]) -> None:
        """Store a text under `key`; of a text larger than the memory, only the end is stored."""
        room = self._memory - _key_bytes(key) - _TEXT_BYTES
        fitting = bisect_right(range(len(text) + 1), room, key=self._new_index().bytes_with) - 1
        if fitting < 1:
            return
        while self._bytes_with(key, fitting) > self._memory:
            self._drop_oldest()
        texts = self._by_key.get(key)
        if texts is None:
            texts = self._by_key[key] = self._new_index()
        else:
            self._num_bytes -= self._bytes_of(key)
        texts.extend(text[len(text) - fitting :])
        texts.close_text()
        self._num_bytes += self._bytes_of(key)
        self._ages.append(key)

    def of(self, key: str | None) -> TextIndex | None:
        """Return the texts stored under `key`, or None."""
        return self._by_key.get(key)

    def _new_index(self) -> TextIndex:
        return TextIndex(self._library, self._lengths, max_segment=self._max_segment)

    def _bytes_with(self, key: str | None, count: int) -> int:
        """Return the maximum bytes of all keys after adding a text of `count` tokens to this one."""
        texts = self._by_key.get(key)
        if texts is None:
            added = _key_bytes(key) + self._new_index().bytes_with(count)
        else:
            added = texts.bytes_with(count) - texts.num_bytes
        return self._num_bytes + added + _TEXT_BYTES

    def _bytes_of(self, key: str | None) -> int:
        texts = self._by_key[key]
        return _key_bytes(key) + texts.num_bytes + _TEXT_BYTES * texts.num_texts

    def _drop_oldest(self) -> None:
        key = self._ages.pop(0)
        self._num_bytes -= self._bytes_of(key)
        self._by_key[key].drop_oldest_text()
        if self._by_key[key].num_texts:
            self._num_bytes += self._bytes_of(key)
        else:
            del self._by_key[key]


def _key_bytes(key: str | None) -> int:
    return _KEY_BYTES + sys.getsizeof(key)
