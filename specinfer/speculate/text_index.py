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
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

from specinfer.errors import ensure

SEPARATOR = -1  # no token id
LENGTHS = (1, 2, 4, 8)  # of the n-grams that are indexed, unless somebody wants others
_SHORTEST = 32  # tokens of a stretch
_INT = 4  # bytes of a token, of a place in a table and of a link
_INDEX_BYTES = 640  # of the objects of an index without texts
_STRETCH_BYTES = 320  # of a stretch's own objects
_ARRAY_BYTES = 96  # of an array's object


class TextIndex:
    """Some texts, oldest first, the newest one still growing, and an index of their n-grams.

    Places count the tokens ever added, separators included, and are never used again. `lengths` are those
    of the n-grams that can be looked up. A stretch is at most `longest_stretch` tokens long, unless more are
    added at once: the shorter, the sooner the room of old texts is free. For four lengths a token takes 52
    bytes, and up to 100 while the newest stretch is empty.
    """

    def __init__(self, lengths: Sequence[int] = LENGTHS, *, longest_stretch: int | None = None) -> None:
        self._lengths = tuple(sorted(lengths))
        self._longest = longest_stretch
        self._tokens = array("i")  # position p lies at p - _origin
        self._origin = 0
        self._base = 0  # the first position that is still alive
        self._text_start = 0  # of the newest text
        self._text_ends = array("q")  # positions after the separators of closed texts
        self._stretches: list[_Stretch] = []  # oldest first; all together they reach from _base to _end

    @property
    def num_tokens(self) -> int:
        """The tokens held, separators included."""
        return self._end - self._base

    @property
    def num_texts(self) -> int:
        """The closed texts held."""
        return len(self._text_ends)

    @property
    def num_bytes(self) -> int:
        """The memory of all of it."""
        arrays = sys.getsizeof(self._tokens) + sys.getsizeof(self._text_ends)
        stretches = sum(_stretch_bytes(stretch.size, len(self._lengths)) for stretch in self._stretches)
        return _INDEX_BYTES + arrays + stretches

    def bytes_with(self, count: int) -> int:
        """The bytes at most when one more text, of `count` tokens, is added and closed."""
        size = count + 1
        tokens = _grown(self._tokens, size) - sys.getsizeof(self._tokens)
        ends = _grown(self._text_ends, 1) - sys.getsizeof(self._text_ends)
        missing = size - self._room
        stretch = self._next_size(missing, self.num_tokens + self._room) if missing > 0 else None
        return (
            self.num_bytes
            + max(0, tokens)
            + max(0, ends)
            + (0 if stretch is None else _stretch_bytes(stretch, len(self._lengths)))
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the newest text."""
        done = 0
        while done < len(tokens):
            if self._room == 0:
                self._begin_stretch(len(tokens) - done + 1)  # a separator comes, some day
            done += self._fill(tokens[done : done + self._room])

    def close_text(self) -> None:
        """End the newest text: the next token begins another one."""
        if self._room == 0:
            self._begin_stretch(1)
        self._tokens.append(SEPARATOR)
        self._text_start = self._end
        self._text_ends.append(self._end)

    def drop_oldest_text(self) -> int:
        """Forget the oldest closed text; returns the tokens that were freed, its separator included."""
        start, self._base = self._base, self._text_ends.pop(0)
        while self._stretches and self._stretches[0].stop <= self._base:
            del self._stretches[0]
        dead = self._base - self._origin
        if 2 * dead > len(self._tokens):  # as many moved as were dropped since the last time: O(1) a token
            del self._tokens[:dead]
            self._origin = self._base
        return self._base - start

    def tail(self, count: int) -> array[int]:
        """The last tokens of the newest text, at most `count`."""
        return self._tokens[max(self._text_start, self._end - count) - self._origin :]

    def newest_text(self) -> array[int]:
        """The tokens of the text that still grows."""
        return self._tokens[self._text_start - self._origin :]

    def places(self, tail: array[int], length: int, most: int) -> Iterator[int]:
        """Where the last `length` tokens of `tail` end, newest first, an operation each, at most `most`.

        A place is the index of what follows, also where nothing does. `length` is one of the index's.
        """
        if length > len(tail):
            return
        gram, which = tail[len(tail) - length :].tobytes(), self._lengths.index(length)
        for stretch in reversed(self._stretches):
            heads, older = stretch.heads[which], stretch.older[which]
            stop = heads[_head(heads, gram, length, self._tokens, stretch.start - self._origin)]
            while stop:
                if stretch.start + stop <= self._base or most == 0:
                    return
                yield stretch.start + stop
                most -= 1
                stop = older[stop - 1]

    def occurrences(self, tail: array[int], limit: int) -> list[tuple[int, int]]:
        """Where the end of `tail` stands and something follows: (position of what follows, tokens matched).

        Longer n-grams come first, of one length the newer places; at most `limit` places. The tokens matched
        are counted up to the whole of `tail`.
        """
        found: dict[int, int] = {}
        for length in reversed(self._lengths):
            for stop in self.places(tail, length, 2 * limit):  # those of longer n-grams are met again
                if stop not in found and self._goes_on(stop):
                    found[stop] = self._matched(stop, tail)
                    if len(found) == limit:
                        return list(found.items())
        return list(found.items())

    def following(self, position: int, count: int) -> array[int]:
        """What stands at `position` and after it in the same text, at most `count` tokens."""
        at = position - self._origin
        tokens = self._tokens[at : at + count]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def check_integrity(self) -> None:
        """Raise IntegrityError when texts, tables and chains disagree."""
        ends = [*self._text_ends]
        live = self._tokens[self._base - self._origin :]
        separators = [self._base + i + 1 for i, token in enumerate(live) if token == SEPARATOR]
        ensure(separators == ends, "a separator ends each closed text")
        ensure(self._text_start == (ends[-1] if ends else self._base), "the newest text follows the closed")
        stretches = self._stretches
        ensure(all(one.stop == other.start for one, other in pairwise(stretches)), "stretches follow on")
        if live:
            ensure(bool(stretches) and stretches[0].start <= self._base < stretches[0].stop, "none is dead")
            ensure(stretches[-1].start < self._end <= stretches[-1].stop, "none is unused")
        texts = _split(live, self._base)
        for length in self._lengths:
            places: dict[tuple[int, ...], list[int]] = {}
            for start, text in texts:
                for i in range(length, len(text) + 1):
                    places.setdefault(tuple(text[i - length : i]), []).append(start + i)
            for gram, stops in places.items():
                walked = list(self.places(array("i", gram), length, len(live)))
                ensure(walked == stops[::-1], f"the chains of {gram} visit {walked}, not {stops}")

    @property
    def _end(self) -> int:
        return self._origin + len(self._tokens)

    @property
    def _room(self) -> int:
        """The tokens that fit into the newest stretch."""
        return self._stretches[-1].stop - self._end if self._stretches else 0

    def _begin_stretch(self, needed: int) -> None:
        size = self._next_size(needed, self.num_tokens)
        self._stretches.append(_Stretch(self._end, size, self._lengths))

    def _next_size(self, needed: int, held: int) -> int:
        return max(_SHORTEST, needed, held if self._longest is None else min(held, self._longest))

    def _fill(self, part: Sequence[int]) -> int:
        """Add tokens that fit into the newest stretch; returns how many."""
        tokens, stretch = self._tokens, self._stretches[-1]
        start = len(tokens)
        tokens.extend(part)
        shift, text_start = stretch.start - self._origin, self._text_start - self._origin
        end, seen = len(tokens), max(text_start, start + 1 - self._lengths[-1])
        text = tokens[seen:].tobytes()
        for length, heads, older in zip(self._lengths, stretch.heads, stretch.older, strict=True):
            for stop in range(max(start + 1, text_start + length), end + 1):
                last = _INT * (stop - seen)
                at = _head(heads, text[last - _INT * length : last], length, tokens, shift)
                older[stop - shift - 1] = heads[at]
                heads[at] = stop - shift
        return len(part)

    def _goes_on(self, stop: int) -> bool:
        at = stop - self._origin
        return at < len(self._tokens) and self._tokens[at] != SEPARATOR

    def _matched(self, stop: int, tail: Sequence[int]) -> int:
        """How many tokens before `stop` equal the last of `tail`."""
        at, tokens = stop - self._origin, self._tokens
        most = min(len(tail), stop - self._base)
        if tokens[at - most : at] == tail[len(tail) - most :]:
            return most
        matched = 0
        while tokens[at - 1 - matched] == tail[-1 - matched]:
            matched += 1
        return matched


class _Stretch:
    """The n-grams that end at `size` neighbouring positions, those after `start`.

    Ends are counted from `start`, so they begin at 1, and 0 is none. A table has two places for each.
    """

    __slots__ = ("heads", "older", "size", "start")

    def __init__(self, start: int, size: int, lengths: Sequence[int]) -> None:
        self.start = start
        self.size = size
        # Of each length: an open hash table of the newest ends; the end before that one, by end - 1.
        self.heads = tuple(array("i", (0,)) * (2 * size) for _ in lengths)
        self.older = tuple(array("i", (0,)) * size for _ in lengths)

    @property
    def stop(self) -> int:
        """The position after its last one."""
        return self.start + self.size


def _head(heads: array[int], gram: bytes, length: int, tokens: array[int], shift: int) -> int:
    """Where the table `heads` has the newest end of `gram`, or would have it; end 1 lies at tokens[shift]."""
    # Python's hash of bytes differs from process to process, so nobody can write texts that collide.
    at = hash(gram) % len(heads)
    while stop := heads[at]:
        stop += shift
        begin = stop - length  # below 0: of a text that has left
        if begin >= 0 and tokens[begin:stop].tobytes() == gram:
            break
        at = at + 1 if at + 1 < len(heads) else 0
    return at


def _stretch_bytes(size: int, num_lengths: int) -> int:
    return _STRETCH_BYTES + num_lengths * (2 * _ARRAY_BYTES + 3 * _INT * size)


def _grown(grown: array[int], more: int) -> int:
    """The bytes at most that an array has, its object included, when so many numbers were added."""
    size = len(grown) + more
    return _ARRAY_BYTES + grown.itemsize * (size + size // 16 + 8)  # Python adds a sixteenth


def _split(tokens: Sequence[int], start: int) -> list[tuple[int, list[int]]]:
    """The texts between separators, each with its first position."""
    texts: list[tuple[int, list[int]]] = [(start, [])]
    for i, token in enumerate(tokens, start=start + 1):
        if token == SEPARATOR:
            texts.append((i, []))
        else:
            texts[-1][1].append(token)
    return texts
