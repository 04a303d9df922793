"""TextIndex: an index of the n-grams of texts, newest first, for looking up guesses.

It works like LZ77 compressors. For a few lengths n, a hash table has the newest end position of each n-gram,
and a chain links each position to the one before. The continuations of a text are found by following the
chain of its longest known n-gram, then of the next shorter one. Every operation takes O(1) time per token,
and old texts can be removed, which is far more complex with a suffix tree.

    base                                                     end
     |  text 1 ... SEPARATOR  text 2 ... SEPARATOR  text 3 ...|
     no match and no continuation crosses a separator

    |  segment  |  segment  |        segment        |   ...   each as long as all earlier ones together

Tables and chains belong to segments of positions. The arrays of a segment have their final size from its
first token on, so no table is rebuilt, which would delay a step, and the memory is known. A segment is
dropped with the last of its texts. Chains end with their segment; a search continues in the one before.

The index is in native memory (kernels/cpu/text_index.cpp) and is searched there (kernels/cpu/lookups.cpp).
"""

from __future__ import annotations

import secrets
import weakref
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from specinfer.kernels.library import Library

SEPARATOR: Final = -1  # not a token id
LENGTHS: Final = (1, 2, 4, 8)  # default lengths of n-grams
_MAX_TOKENS: Final = (1 << 31) - 1
_SECRET: Final = array("Q", secrets.token_bytes(16))  # hash key, so that no user can cause collisions


class _Figures(NamedTuple):
    """State of an index: positions, closed texts, bytes."""

    base: int  # the first position held
    text_start: int  # start of the newest text
    end: int
    num_texts: int
    num_bytes: int


class TextIndex:
    """Texts, oldest first, the newest one still growing, with an index of their n-grams.

    Positions count all tokens ever added, including separators, and are never reused. With four lengths a
    token takes 52 bytes, and up to 100 while the newest segment is empty. Not thread-safe.
    """

    def __init__(
        self, library: Library, lengths: Sequence[int] = LENGTHS, *, max_segment: int | None = None
    ) -> None:
        """Make an empty index of these n-gram lengths, with segments of at most `max_segment` tokens.

        A segment is longer if more tokens are added at once. Shorter segments free the memory of old texts
        sooner. Raises ValueError without lengths, or if one is below 1.
        """
        self.lengths = tuple(sorted(lengths))
        self.num_tokens = 0  # tokens held, including separators
        sizes, longest = array("q", self.lengths), -1 if max_segment is None else max_segment
        address = library.index_new(
            sizes.buffer_info()[0], len(sizes), min(longest, _MAX_TOKENS), _SECRET.buffer_info()[0]
        )
        if address is None:
            raise ValueError(f"n-grams of {self.lengths} tokens; allowed: one length or more, each 1 or more")
        self._library = library
        self.address: int = address  # of the native index
        # Not at exit, when a daemon thread may still be in the library.
        weakref.finalize(self, library.index_free, address).atexit = False

    @property
    def num_texts(self) -> int:
        """Number of closed texts."""
        return self._figures().num_texts

    @property
    def num_bytes(self) -> int:
        """Maximum bytes of the index."""
        return self._figures().num_bytes

    def bytes_with(self, count: int) -> int:
        """Return the maximum bytes after adding and closing another text of `count` tokens."""
        num_bytes: int = self._library.index_bytes_with(self.address, min(count, _MAX_TOKENS))
        return num_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the newest text; raises ValueError, adding none, if one is below 0."""
        ids = array("i", tokens)
        if not self._library.index_extend(self.address, ids.buffer_info()[0], len(ids)):
            raise_refusal(ids)
        self.num_tokens += len(ids)

    def close_text(self) -> None:
        """End the newest text; the next token starts another one."""
        if not self._library.index_close(self.address):
            raise_refusal(())
        self.num_tokens += 1

    def drop_oldest_text(self) -> int:
        """Drop the oldest closed text; returns the number of freed tokens, including its separator.

        Raises IndexError if no text is closed.
        """
        freed: int = self._library.index_drop_oldest(self.address)
        if freed < 0:
            raise IndexError("no text is closed")
        self.num_tokens -= freed
        return freed

    def newest_text(self) -> array[int]:
        """Return the tokens of the newest text."""
        figures = self._figures()
        return self._tokens(figures.text_start, figures.end)

    def texts(self) -> list[list[int]]:
        """Return the texts, oldest first."""
        figures = self._figures()
        texts: list[list[int]] = [[]]
        for token in self._tokens(figures.base, figures.end):
            if token == SEPARATOR:
                texts.append([])
            else:
                texts[-1].append(token)
        return texts

    def _figures(self) -> _Figures:
        figures = array("q", bytes(8 * len(_Figures._fields)))
        self._library.index_figures(self.address, figures.buffer_info()[0])
        return _Figures(*figures)

    def _tokens(self, start: int, stop: int) -> array[int]:
        """Return the tokens at positions start..stop-1, which must be held."""
        found = array("i", bytes(4 * (stop - start)))
        self._library.index_tokens(self.address, start, len(found), found.buffer_info()[0])
        return found


def raise_refusal(tokens: Sequence[int]) -> None:
    """Raise the reason why the library refused these tokens: ValueError or MemoryError."""
    if len(tokens) and min(tokens) < 0:
        raise ValueError(f"token {min(tokens)}; tokens are 0 or more")
    raise MemoryError(f"no room for {len(tokens)} more tokens of a text")
