"""Where the n-grams of some texts end, newest first: the memory that guesses are looked up in.

The idea is that of LZ77 compressors. For a few lengths n, a hash table knows the newest place where each
n-gram ends, and a chain leads from each place to the one before. What followed the last tokens of a text is
found by walking the chain of its longest known n-gram, then of the next shorter one. Every operation costs
O(1) a token, and old texts leave without a trace, which a suffix tree can do only with far more machinery.

    base                                                     end
     |  text 1 ... SEPARATOR  text 2 ... SEPARATOR  text 3 ...|
     no match and no continuation crosses a separator

    |  stretch  |  stretch  |        stretch        |   ...   each as long as all that is held before it

Tables and chains belong to stretches of positions. The arrays of a stretch have their size from its first
token on. So no table is ever built anew, which would hold up everybody's step, and the bytes are known. It is
dropped when the last of its texts is. Chains end with their stretch; a walk goes on in the one before.

All of it lies in native memory (kernels/cpu/text_index.cpp), and is searched there (kernels/cpu/lookups.cpp).
"""

from __future__ import annotations

import secrets
import weakref
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from specinfer.errors import ensure
from specinfer.kernels.library import Library

SEPARATOR: Final = -1  # no token id
LENGTHS: Final = (1, 2, 4, 8)  # of the n-grams that are indexed, unless a caller wants others
_MOST: Final = (1 << 31) - 1  # tokens; more are never held
_SECRET: Final = array("Q", secrets.token_bytes(16))  # of hashes: nobody can write texts that collide


class _Figures(NamedTuple):
    """What an index says of itself: positions, closed texts, bytes."""

    base: int  # the first that is alive
    text_start: int  # of the newest text
    end: int
    num_texts: int
    num_bytes: int


class TextIndex:
    """Some texts, oldest first, the newest one still growing, and an index of their n-grams.

    Places count the tokens ever added, separators included, and are never used again. For four lengths a
    token takes 52 bytes, and up to 100 while the newest stretch is empty. One thread at a time may use it.
    """

    def __init__(
        self, library: Library, lengths: Sequence[int] = LENGTHS, *, longest_stretch: int | None = None
    ) -> None:
        """An empty index of n-grams of these lengths, whose stretches are at most so long.

        A stretch is longer where more tokens are added at once. The shorter, the sooner the room of old texts
        is free. Raises ValueError where there are no lengths, or one is below 1.
        """
        self.lengths = tuple(sorted(lengths))
        self.num_tokens = 0  # that are held, separators included
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
        """The closed texts held."""
        return self._figures().num_texts

    @property
    def num_bytes(self) -> int:
        """The memory of all of it, at most."""
        return self._figures().num_bytes

    def bytes_with(self, count: int) -> int:
        """The bytes at most when one more text, of `count` tokens, is added and closed."""
        with_it: int = self._library.index_bytes_with(self.address, min(count, _MOST))
        return with_it

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the newest text; raises ValueError, and adds none, where one is below 0."""
        told = array("i", tokens)
        if not self._library.index_extend(self.address, told.buffer_info()[0], len(told)):
            refuse(told)
        self.num_tokens += len(told)

    def close_text(self) -> None:
        """End the newest text: the next token begins another one."""
        if not self._library.index_close(self.address):
            refuse(())
        self.num_tokens += 1

    def drop_oldest_text(self) -> int:
        """Forget the oldest closed text; returns the tokens that were freed, its separator included.

        Raises IndexError where there is none.
        """
        freed: int = self._library.index_drop_oldest(self.address)
        if freed < 0:
            raise IndexError("no text is closed")
        self.num_tokens -= freed
        return freed

    def newest_text(self) -> array[int]:
        """The tokens of the text that still grows."""
        figures = self._figures()
        return self._tokens(figures.text_start, figures.end)

    def places(self, tail: Sequence[int], length: int, most: int) -> list[int]:
        """Where the last `length` tokens of `tail` end, newest first, at most `most`.

        A place is the index of what follows, also where nothing does. Raises ValueError where `length` is
        none of the index's.
        """
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

    def texts(self) -> list[tuple[int, list[int]]]:
        """The texts held, each with its first position: the oldest first, the growing one last."""
        figures = self._figures()
        texts: list[tuple[int, list[int]]] = [(figures.base, [])]
        for position, token in enumerate(self._tokens(figures.base, figures.end), start=figures.base + 1):
            if token == SEPARATOR:
                texts.append((position, []))
            else:
                texts[-1][1].append(token)
        return texts

    def check_integrity(self) -> None:
        """Raise IntegrityError when texts, tables and chains disagree."""
        figures = self._figures()
        ensure(bool(self._library.index_sound(self.address)), "texts, separators and stretches agree")
        ensure(self.num_tokens == figures.end - figures.base, f"{self.num_tokens} tokens are counted")
        texts = self.texts()
        for length in self.lengths:
            places: dict[tuple[int, ...], list[int]] = {}
            for start, text in texts:
                for i in range(length, len(text) + 1):
                    places.setdefault(tuple(text[i - length : i]), []).append(start + i)
            for gram, stops in places.items():
                walked = self.places(gram, length, self.num_tokens)
                ensure(walked == stops[::-1], f"the chains of {gram} visit {walked}, not {stops}")

    def recount(self) -> None:
        """See how many tokens are held, where the library may have read some."""
        figures = self._figures()
        self.num_tokens = figures.end - figures.base

    def _figures(self) -> _Figures:
        figures = array("q", bytes(8 * len(_Figures._fields)))
        self._library.index_figures(self.address, figures.buffer_info()[0])
        return _Figures(*figures)

    def _tokens(self, start: int, stop: int) -> array[int]:
        """The tokens at these positions, which are held."""
        found = array("i", bytes(4 * (stop - start)))
        self._library.index_tokens(self.address, start, len(found), found.buffer_info()[0])
        return found


def refuse(tokens: Sequence[int]) -> None:
    """Raise what it is that keeps the library from reading these: ValueError, or MemoryError."""
    if len(tokens) and min(tokens) < 0:
        raise ValueError(f"token {min(tokens)}; tokens are 0 or more")
    raise MemoryError(f"no room for {len(tokens)} more tokens of a text")
