"""An index of n-grams in plain Python: the oracle of the library's, and where there are no native kernels."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from specinfer.errors import ensure
from specinfer.speculate.lookups.text_index import LENGTHS, SEPARATOR, check_chains, up_to_separator

_SHORTEST: Final = 32  # tokens of a stretch
_INT: Final = 4  # bytes of a token, of a place in a table and of a link
_INDEX_BYTES: Final = 640  # of the objects of an index without texts
_STRETCH_BYTES: Final = 320  # of a stretch's own objects
_ARRAY_BYTES: Final = 96  # of an array's object


class PlainTextIndex:
    """A `TextIndex`; `lengths` are those of the n-grams that can be looked up, as NewIndex says."""

    def __init__(self, lengths: Sequence[int] = LENGTHS, *, longest_stretch: int | None = None) -> None:
        self.lengths = tuple(sorted(lengths))
        if not self.lengths or self.lengths[0] < 1:
            raise ValueError(f"n-grams of {self.lengths} tokens; allowed: one length or more, each 1 or more")
        self._longest = longest_stretch
        self._tokens = array("i")  # position p lies at p - _origin
        self._origin = 0
        self._base = 0  # the first position that is still alive
        self._text_start = 0  # of the newest text
        self._text_ends = array("q")  # positions after the separators of closed texts
        self._gone = 0  # of these, texts that have left
        self._stretches: list[_Stretch] = []  # oldest first; all together they reach from _base to _end

    @property
    def num_tokens(self) -> int:
        """As TextIndex says."""
        return self._end - self._base

    @property
    def num_texts(self) -> int:
        """As TextIndex says."""
        return len(self._text_ends) - self._gone

    @property
    def num_bytes(self) -> int:
        """As TextIndex says."""
        return self._bytes_of(len(self._tokens), len(self._text_ends))

    def bytes_with(self, count: int) -> int:
        """As TextIndex says."""
        size = count + 1
        missing = size - self._room
        more = 0
        if missing > 0:
            more = self._stretch_bytes(self._next_size(missing, self.num_tokens + self._room))
        return self._bytes_of(len(self._tokens) + size, len(self._text_ends) + 1) + more

    def extend(self, tokens: Sequence[int]) -> None:
        """As TextIndex says."""
        if len(tokens) and min(tokens) < 0:
            raise ValueError(f"token {min(tokens)}; tokens are 0 or more")
        done = 0
        while done < len(tokens):
            if self._room == 0:
                self._begin_stretch(len(tokens) - done + 1)  # a separator comes, some day
            done += self._fill(tokens[done : done + self._room])

    def close_text(self) -> None:
        """As TextIndex says."""
        if self._room == 0:
            self._begin_stretch(1)
        self._tokens.append(SEPARATOR)
        self._text_start = self._end
        self._text_ends.append(self._end)

    def drop_oldest_text(self) -> int:
        """As TextIndex says."""
        if self.num_texts == 0:
            raise IndexError("no text is closed")
        start, self._base = self._base, self._text_ends[self._gone]
        self._gone += 1
        if 2 * self._gone > len(self._text_ends):
            self._text_ends = self._text_ends[self._gone :]  # to delete them would keep their memory
            self._gone = 0
        while self._stretches and self._stretches[0].stop <= self._base:
            del self._stretches[0]
        dead = self._base - self._origin
        if 2 * dead > len(self._tokens):  # as many moved as were dropped since the last time: O(1) a token
            self._tokens = self._tokens[dead:]
            self._origin = self._base
        return self._base - start

    def tail(self, count: int) -> array[int]:
        """As TextIndex says."""
        return self._tokens[max(self._text_start, self._end - count) - self._origin :]

    def newest_text(self) -> array[int]:
        """As TextIndex says."""
        return self._tokens[self._text_start - self._origin :]

    def places(self, tail: array[int], length: int, most: int) -> Iterator[int]:
        """As TextIndex says."""
        if length not in self.lengths:
            raise ValueError(f"n-grams of {length} tokens are not looked up; of {self.lengths} are")
        if length > len(tail):
            return
        gram, which = tail[len(tail) - length :].tobytes(), self.lengths.index(length)
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
        """As TextIndex says."""
        found: dict[int, int] = {}
        for length in reversed(self.lengths):
            for stop in self.places(tail, length, 2 * limit):  # those of longer n-grams are met again
                if stop not in found and self._goes_on(stop):
                    found[stop] = self._matched(stop, tail)
                    if len(found) == limit:
                        return list(found.items())
        return list(found.items())

    def following(self, position: int, count: int) -> array[int]:
        """As TextIndex says."""
        at = position - self._origin
        return up_to_separator(self._tokens[at : at + count])

    def check_integrity(self) -> None:
        """As TextIndex says."""
        ends = [*self._text_ends[self._gone :]]
        live = self._tokens[self._base - self._origin :]
        separators = [self._base + i + 1 for i, token in enumerate(live) if token == SEPARATOR]
        ensure(separators == ends, "a separator ends each closed text")
        ensure(self._text_start == (ends[-1] if ends else self._base), "the newest text follows the closed")
        stretches = self._stretches
        ensure(all(one.stop == other.start for one, other in pairwise(stretches)), "stretches follow on")
        if live:
            ensure(bool(stretches) and stretches[0].start <= self._base < stretches[0].stop, "none is dead")
            ensure(stretches[-1].start < self._end <= stretches[-1].stop, "none is unused")
        check_chains(self, self.lengths, live, self._base)

    @property
    def _end(self) -> int:
        return self._origin + len(self._tokens)

    @property
    def _room(self) -> int:
        """The tokens that fit into the newest stretch."""
        return self._stretches[-1].stop - self._end if self._stretches else 0

    def _begin_stretch(self, needed: int) -> None:
        size = self._next_size(needed, self.num_tokens)
        self._stretches.append(_Stretch(self._end, size, self.lengths))

    def _next_size(self, needed: int, held: int) -> int:
        return max(_SHORTEST, needed, held if self._longest is None else min(held, self._longest))

    def _bytes_of(self, tokens: int, texts: int) -> int:
        """The memory at most with the stretches that there are, and so many tokens and ends of texts."""
        stretches = sum([self._stretch_bytes(stretch.size) for stretch in self._stretches])
        return _INDEX_BYTES + _grown(_INT, tokens) + _grown(8, texts) + stretches

    def _stretch_bytes(self, size: int) -> int:
        return _STRETCH_BYTES + len(self.lengths) * (2 * _ARRAY_BYTES + 3 * _INT * size)

    def _fill(self, part: Sequence[int]) -> int:
        """Add tokens that fit into the newest stretch; returns how many."""
        tokens, stretch = self._tokens, self._stretches[-1]
        start = len(tokens)
        tokens.extend(part)
        shift, text_start = stretch.start - self._origin, self._text_start - self._origin
        end, seen = len(tokens), max(text_start, start + 1 - self.lengths[-1])
        text = tokens[seen:].tobytes()
        for length, heads, older in zip(self.lengths, stretch.heads, stretch.older, strict=True):
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


def _grown(item: int, size: int) -> int:
    """The bytes at most that an array of so many items has, its object included."""
    return _ARRAY_BYTES + item * (size + size // 16 + 8)  # Python adds a sixteenth
