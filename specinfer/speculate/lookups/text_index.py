"""Where the n-grams of some texts end, newest first: the memory of the n-gram and the suffix speculator.

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

There is one in plain Python (plain_text_index.py) and one in native code (native_text_index.py). They hold
the same, find the same in the same order, and count the same bytes: those that either takes at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from specinfer.errors import ensure

SEPARATOR: Final = -1  # no token id
LENGTHS: Final = (1, 2, 4, 8)  # of the n-grams that are indexed, unless somebody wants others


class TextIndex(Protocol):
    """Some texts, oldest first, the newest one still growing, and an index of their n-grams.

    Places count the tokens ever added, separators included, and are never used again. For four lengths a
    token takes 52 bytes, and up to 100 while the newest stretch is empty. One thread at a time may use it.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Those of the n-grams that can be looked up, ascending."""
        ...

    @property
    def num_tokens(self) -> int:
        """The tokens held, separators included."""
        ...

    @property
    def num_texts(self) -> int:
        """The closed texts held."""
        ...

    @property
    def num_bytes(self) -> int:
        """The memory of all of it, at most."""
        ...

    def bytes_with(self, count: int) -> int:
        """The bytes at most when one more text, of `count` tokens, is added and closed."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the newest text; raises ValueError, and adds none, where one is below 0."""
        ...

    def close_text(self) -> None:
        """End the newest text: the next token begins another one."""
        ...

    def drop_oldest_text(self) -> int:
        """Forget the oldest closed text; returns the tokens that were freed, its separator included.

        Raises IndexError where there is none.
        """
        ...

    def tail(self, count: int) -> array[int]:
        """The last tokens of the newest text, at most `count`."""
        ...

    def newest_text(self) -> array[int]:
        """The tokens of the text that still grows."""
        ...

    def places(self, tail: array[int], length: int, most: int) -> Iterable[int]:
        """Where the last `length` tokens of `tail` end, newest first, an operation each, at most `most`.

        A place is the index of what follows, also where nothing does. Raises ValueError where `length` is
        none of the index's.
        """
        ...

    def occurrences(self, tail: array[int], limit: int) -> list[tuple[int, int]]:
        """Where the end of `tail` stands and something follows: (position of what follows, tokens matched).

        Longer n-grams come first, of one length the newer places; at most `limit` places. The tokens matched
        are counted up to the whole of `tail`.
        """
        ...

    def following(self, position: int, count: int) -> array[int]:
        """What stands at `position` and after it in the same text, at most `count` tokens."""
        ...

    def check_integrity(self) -> None:
        """Raise IntegrityError when texts, tables and chains disagree."""
        ...


class NewIndex(Protocol):
    """What makes an empty index."""

    def __call__(self, lengths: Sequence[int] = LENGTHS, *, longest_stretch: int | None = None) -> TextIndex:
        """One of n-grams of these lengths, whose stretches are at most so long.

        A stretch is longer where more tokens are added at once. The shorter, the sooner the room of old texts
        is free. Raises ValueError where there are no lengths, or one is below 1.
        """
        ...


def check_chains(index: TextIndex, lengths: Iterable[int], held: array[int], base: int) -> None:
    """Raise IntegrityError unless the chains of all n-grams lead to all their places in the tokens held.

    `base` is the position of the first one.
    """
    texts = _split(held, base)
    for length in lengths:
        places: dict[tuple[int, ...], list[int]] = {}
        for start, text in texts:
            for i in range(length, len(text) + 1):
                places.setdefault(tuple(text[i - length : i]), []).append(start + i)
        for gram, stops in places.items():
            walked = [*index.places(array("i", gram), length, len(held))]
            ensure(walked == stops[::-1], f"the chains of {gram} visit {walked}, not {stops}")


def up_to_separator(tokens: array[int]) -> array[int]:
    """The tokens before the first separator."""
    return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


def _split(tokens: Sequence[int], start: int) -> list[tuple[int, list[int]]]:
    """The texts between separators, each with its first position."""
    texts: list[tuple[int, list[int]]] = [(start, [])]
    for i, token in enumerate(tokens, start=start + 1):
        if token == SEPARATOR:
            texts.append((i, []))
        else:
            texts[-1][1].append(token)
    return texts
