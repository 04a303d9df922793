"""An index of n-grams in native memory (cpu/text_index.cpp)."""

from __future__ import annotations

import secrets
import weakref
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from specinfer.errors import ensure
from specinfer.kernels.library import Library
from specinfer.speculate.lookups.text_index import LENGTHS, check_chains, up_to_separator

_MOST: Final = (1 << 31) - 1  # tokens; more are never held
_SECRET: Final = array("Q", secrets.token_bytes(16))  # of hashes: nobody can write texts that collide


class _Figures(NamedTuple):
    """What an index says of itself: positions, closed texts, bytes."""

    base: int  # the first that is alive
    text_start: int  # of the newest text
    end: int
    num_texts: int
    num_bytes: int


class NativeTextIndex:
    """A `TextIndex`; `lengths` are those of the n-grams that can be looked up, as NewIndex says."""

    def __init__(
        self, library: Library, lengths: Sequence[int] = LENGTHS, *, longest_stretch: int | None = None
    ) -> None:
        self.lengths = tuple(sorted(lengths))
        self.num_tokens = 0
        told, longest = array("q", self.lengths), -1 if longest_stretch is None else longest_stretch
        address = library.index_new(
            *(told.buffer_info()[0], len(told), min(longest, _MOST), _SECRET.buffer_info()[0])
        )
        if address is None:
            raise ValueError(f"n-grams of {self.lengths} tokens; allowed: one length or more, each 1 or more")
        self._library = library
        self.address: int = address  # of what the library holds
        # Not at exit: a thread that nobody waits for may be in the library yet.
        weakref.finalize(self, library.index_free, address).atexit = False

    @property
    def num_texts(self) -> int:
        """As TextIndex says."""
        return self._figures().num_texts

    @property
    def num_bytes(self) -> int:
        """As TextIndex says."""
        return self._figures().num_bytes

    def bytes_with(self, count: int) -> int:
        """As TextIndex says."""
        with_it: int = self._library.index_bytes_with(self.address, min(count, _MOST))
        return with_it

    def extend(self, tokens: Sequence[int]) -> None:
        """As TextIndex says."""
        told = array("i", tokens)
        if not self._library.index_extend(self.address, told.buffer_info()[0], len(told)):
            refuse(told)
        self.num_tokens += len(told)

    def close_text(self) -> None:
        """As TextIndex says."""
        if not self._library.index_close(self.address):
            refuse(())
        self.num_tokens += 1

    def drop_oldest_text(self) -> int:
        """As TextIndex says."""
        freed: int = self._library.index_drop_oldest(self.address)
        if freed < 0:
            raise IndexError("no text is closed")
        self.num_tokens -= freed
        return freed

    def tail(self, count: int) -> array[int]:
        """As TextIndex says."""
        figures = self._figures()
        return self._tokens(max(figures.text_start, figures.end - count), figures.end)

    def newest_text(self) -> array[int]:
        """As TextIndex says."""
        figures = self._figures()
        return self._tokens(figures.text_start, figures.end)

    def places(self, tail: array[int], length: int, most: int) -> list[int]:
        """As TextIndex says."""
        most = max(0, min(most, self.num_tokens))
        found = array("q", bytes(8 * (most + 1)))
        told = array("i", tail)
        count = self._library.index_places(
            *(self.address, told.buffer_info()[0], len(told), min(length, _MOST), most),
            found.buffer_info()[0],
        )
        if count < 0:
            raise ValueError(f"n-grams of {length} tokens are not looked up; of {self.lengths} are")
        return found[:count].tolist()

    def occurrences(self, tail: array[int], limit: int) -> list[tuple[int, int]]:
        """As TextIndex says."""
        limit = max(0, min(limit, self.num_tokens))
        found = array("q", bytes(16 * (limit + 1)))
        told = array("i", tail)
        count = self._library.index_occurrences(
            self.address, told.buffer_info()[0], len(told), limit, found.buffer_info()[0]
        )
        return [*zip(found[: 2 * count : 2], found[1 : 2 * count : 2], strict=True)]

    def following(self, position: int, count: int) -> array[int]:
        """As TextIndex says."""
        return up_to_separator(self._tokens(position, position + count))

    def check_integrity(self) -> None:
        """As TextIndex says."""
        figures = self._figures()
        ensure(bool(self._library.index_sound(self.address)), "texts, separators and stretches agree")
        ensure(self.num_tokens == figures.end - figures.base, f"{self.num_tokens} tokens are counted")
        held = self._tokens(figures.base, figures.end)
        check_chains(self, self.lengths, held, figures.base)

    def recount(self) -> None:
        """See how many tokens are held, where the library may have read some."""
        figures = self._figures()
        self.num_tokens = figures.end - figures.base

    def _figures(self) -> _Figures:
        figures = array("q", bytes(8 * len(_Figures._fields)))
        self._library.index_figures(self.address, figures.buffer_info()[0])
        return _Figures(*figures)

    def _tokens(self, start: int, stop: int) -> array[int]:
        """The tokens at these positions that are held."""
        wanted = max(0, min(stop - start, self.num_tokens))
        found = array("i", bytes(4 * wanted))
        count = self._library.index_tokens(self.address, start, wanted, found.buffer_info()[0])
        return found[:count]


def refuse(tokens: Sequence[int]) -> None:
    """Raise what it is that keeps the library from reading these: ValueError, or MemoryError."""
    if len(tokens) and min(tokens) < 0:
        raise ValueError(f"token {min(tokens)}; tokens are 0 or more")
    raise MemoryError(f"no room for {len(tokens)} more tokens of a text")
