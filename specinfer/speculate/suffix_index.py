"""Where the n-grams of some texts end, newest first: the memory of the suffix speculator.

The idea is that of LZ77 compressors. For a few lengths n, a table knows the newest place where each n-gram
ends, and a chain leads from each place to the one before. What followed the last tokens of a text is found
by walking the chain of its longest known n-gram, then of the next shorter one. Every operation costs O(1) a
token, and old texts leave without a trace, which a suffix tree can do only with far more machinery.

    base                                                     end
     |  text 1 ... SEPARATOR  text 2 ... SEPARATOR  text 3 ...|
     no match and no continuation crosses a separator
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from specinfer.errors import ensure

SEPARATOR = -1  # no token id
LENGTHS = (1, 2, 4, 8)  # of the n-grams that are indexed, shortest first


class SuffixIndex:
    """Some texts, oldest first, the newest one still growing, and an index of their n-grams.

    Positions count the tokens ever added, separators included, and are never used again.
    """

    def __init__(self) -> None:
        self._tokens = array("i")  # position p lies at p - _origin
        self._origin = 0
        self._base = 0  # the first position that is still alive
        self._text_start = 0  # of the newest text
        self._text_ends: deque[int] = deque()  # positions after the separators of closed texts
        self._newest: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)  # n-gram's hash -> its last end
        # Distance from the end of an n-gram to the end of its next older occurrence, 0 for none; at p - 1.
        self._older: tuple[array[int], ...] = tuple(array("i") for _ in LENGTHS)

    @property
    def num_tokens(self) -> int:
        """The tokens held, separators included."""
        return self._end - self._base

    @property
    def num_texts(self) -> int:
        """The closed texts held."""
        return len(self._text_ends)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the newest text."""
        held = self._tokens
        for token in tokens:
            held.append(token)
            stop = self._end
            for n, newest, older in zip(LENGTHS, self._newest, self._older, strict=True):
                if stop - self._text_start < n:
                    older.append(0)
                    continue
                key = hash(tuple(held[-n:]))
                last = newest.get(key, -1)
                older.append(stop - last if last > self._base else 0)
                newest[key] = stop

    def close_text(self) -> None:
        """End the newest text: the next token begins another one."""
        self._tokens.append(SEPARATOR)
        for older in self._older:
            older.append(0)
        self._text_start = self._end
        self._text_ends.append(self._end)

    def drop_oldest_text(self) -> int:
        """Forget the oldest closed text; returns the tokens that were freed, its separator included."""
        start, stop = self._base, self._text_ends.popleft()
        held = self._tokens[start - self._origin : stop - 1 - self._origin]
        for n, newest in zip(LENGTHS, self._newest, strict=True):
            for i in range(n, len(held) + 1):
                key = hash(tuple(held[i - n : i]))
                if newest.get(key) == start + i:  # else a younger text has the n-gram too
                    del newest[key]
        self._base = stop
        dead = stop - self._origin
        if 2 * dead > len(self._tokens):  # as many moved as were dropped since the last time: O(1) a token
            del self._tokens[:dead]
            for older in self._older:
                del older[:dead]
            self._origin = stop
        return stop - start

    def tail(self, count: int) -> array[int]:
        """The last tokens of the newest text, at most `count`."""
        return self._tokens[max(self._text_start, self._end - count) - self._origin :]

    def newest_text(self) -> array[int]:
        """The tokens of the text that still grows."""
        return self._tokens[self._text_start - self._origin :]

    def occurrences(self, tail: array[int], limit: int) -> list[tuple[int, int]]:
        """Where the end of `tail` stands and something follows: (position of what follows, tokens matched).

        Longer n-grams of LENGTHS come first, of one length the newer places; at most `limit` places. The
        tokens matched are counted up to the whole of `tail`.
        """
        found: dict[int, int] = {}
        for n, newest, older in zip(
            reversed(LENGTHS), reversed(self._newest), reversed(self._older), strict=True
        ):
            if n > len(tail):
                continue
            stop = newest.get(hash(tuple(tail[-n:])), -1)
            for _ in range(2 * limit):  # places of longer n-grams are met again
                if stop <= self._base:
                    break
                if stop not in found and self._goes_on(stop):
                    matched = self._matched(stop, tail)
                    if matched >= n:  # else another n-gram has the same hash
                        found[stop] = matched
                        if len(found) == limit:
                            return list(found.items())
                distance = older[stop - 1 - self._origin]
                if distance == 0:
                    break
                stop -= distance
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
        ensure(all(len(older) == len(self._tokens) for older in self._older), "one link per token")
        texts = _split(live, self._base)
        for n, newest, older in zip(LENGTHS, self._newest, self._older, strict=True):
            places: dict[int, list[int]] = {}
            for start, text in texts:
                for i in range(n, len(text) + 1):
                    places.setdefault(hash(tuple(text[i - n : i])), []).append(start + i)
            ensure(newest.keys() == places.keys(), f"the table of {n}-grams names those of live texts")
            for key, stops in places.items():
                chain = [newest[key]]
                while distance := older[chain[-1] - 1 - self._origin]:
                    if chain[-1] - distance <= self._base:
                        break
                    chain.append(chain[-1] - distance)
                ensure(chain == stops[::-1], f"the chain of {n}-gram {key} visits all its places")

    @property
    def _end(self) -> int:
        return self._origin + len(self._tokens)

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


def _split(tokens: Sequence[int], start: int) -> list[tuple[int, list[int]]]:
    """The texts between separators, each with its first position."""
    texts: list[tuple[int, list[int]]] = [(start, [])]
    for i, token in enumerate(tokens, start=start + 1):
        if token == SEPARATOR:
            texts.append((i, []))
        else:
            texts[-1][1].append(token)
    return texts
