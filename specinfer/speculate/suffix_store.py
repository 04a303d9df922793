"""Texts of finished requests, kept apart by cache key, bounded together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specinfer.errors import ensure
from specinfer.speculate.text_index import TextIndex


class SuffixStore:
    """One TextIndex per cache key; the oldest texts of all keys leave when `memory` tokens are full.

    A key's texts lie in an index of their own, so a search in one key cannot meet a text of another.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory  # tokens of all keys together, one separator per text included
        self._num_tokens = 0
        self._indexes: dict[str | None, TextIndex] = {}
        self._ages: deque[str | None] = deque()  # the keys of the texts, oldest first

    @property
    def num_tokens(self) -> int:
        """The tokens held for all keys, one separator per text included."""
        return self._num_tokens

    def add(self, key: str | None, text: Sequence[int]) -> None:
        """Keep a text under `key`; of one longer than the memory, its end."""
        kept = text[max(0, len(text) - self._memory + 1) :] if self._memory > 1 else ()
        if not kept:
            return
        while self._num_tokens + len(kept) + 1 > self._memory:
            self._drop_oldest()
        index = self._indexes.setdefault(key, TextIndex())
        index.extend(kept)
        index.close_text()
        self._ages.append(key)
        self._num_tokens += len(kept) + 1

    def of(self, key: str | None) -> TextIndex | None:
        """The texts kept under `key`; None when there are none."""
        return self._indexes.get(key)

    def check_integrity(self) -> None:
        """Raise IntegrityError when the sums or an index are wrong, or the memory is overdrawn."""
        held = sum(index.num_tokens for index in self._indexes.values())
        ensure(self._num_tokens == held, f"{self._num_tokens} tokens are counted, {held} held")
        ensure(held <= max(self._memory, 0), f"{held} tokens in a memory of {self._memory}")
        for key, index in self._indexes.items():
            ensure(index.num_texts == self._ages.count(key) > 0, f"key {key!r} holds texts of no age")
            index.check_integrity()
        ensure(set(self._ages) == self._indexes.keys(), "each key has texts, each text has a key")

    def _drop_oldest(self) -> None:
        key = self._ages.popleft()
        index = self._indexes[key]
        self._num_tokens -= index.drop_oldest_text()
        if index.num_texts == 0:
            del self._indexes[key]
