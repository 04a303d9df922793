"""Search for the stop strings of a request, in its text and in the names of its special tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, order=True)
class Stop:
    """A stop string that ended in the new text: its place in characters of the text, and the string."""

    start: int
    end: int  # the start plus the part of the string that the text has
    string: str


class StopSearch:
    """Finds stop strings in a text that omits special tokens.

    A stop string may contain names of special tokens ("<|im_end|>"). Such strings are also searched in the
    text with the names of omitted tokens, and an omitted token takes no characters of the text.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, visible: Iterable[int] = ()) -> None:
        """`visible` are the special tokens that the text shows."""
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        names = tokenizer.special_names if strings else ()
        with_names = [one for one in strings if any(name in one for name in names)]
        self._plain = StopStrings(strings)
        self._named = StopStrings(with_names) if with_names else None
        self._longest = max(map(len, with_names), default=0)
        # Place and length of the latest omitted names in the named text, and the length of all before them.
        self._omitted: deque[tuple[int, int]] = deque()
        self._earlier = 0

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may start a string."""
        if self._named is None:
            return self._plain.held
        read = self._named.read
        return max(self._plain.held, self._shown(read) - self._shown(read - self._named.held))

    def feed(self, text: str, token: int | None = None, *, omitted: bool = False) -> Stop | None:
        """Read new text and then, if it is a special one that the text does not show, the token behind it.

        `omitted` is true for a token that the text omits in any case. Returns the string that ends there: the
        one with the earliest start, and among these the shortest.
        """
        found = []
        if (place := self._plain.feed(text)) is not None:
            found.append(Stop(*place, self._plain.last))
        if self._named is not None:
            name = ""
            if token is not None and self._tokenizer.is_special(token):
                name = self._tokenizer.text_of(token) if omitted or token not in self._visible else ""
            if name:
                self._omitted.append((self._named.read + len(text), len(name)))
            while self._omitted and sum(self._omitted[0]) < self._named.read - self._longest:
                self._earlier += self._omitted.popleft()[1]
            if (place := self._named.feed(text + name)) is not None:
                start, end = map(self._shown, place)
                found.append(Stop(start, end, self._named.last))
        return min(found, default=None)

    def _shown(self, place: int) -> int:
        """Return how many characters before a place of the named text are in the text."""
        omitted = sum(min(length, max(place - start, 0)) for start, length in self._omitted)
        return place - omitted - self._earlier


class StopStrings:
    """Incremental search for several strings in a text, character by character (Knuth, Morris and Pratt).

    For each partly matched string it keeps the number of its characters that the text ends with. A character
    costs a look-up of the strings that start with it, and one of the partly matched strings, for any length
    of the text and of the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = list(dict.fromkeys(strings))
        self._borders = [_borders(one) for one in self._strings]
        self._by_first: dict[str, list[int]] = {}  # a character -> the numbers of strings that start with it
        for number, one in enumerate(self._strings):
            self._by_first.setdefault(one[0], []).append(number)
        self._matched: dict[int, int] = {}  # a string's number -> number of its characters at the text's end
        self.read = 0  # characters of the text so far
        self.last = ""  # the string that was found last

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may start a string."""
        return max(self._matched.values(), default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Read new text; returns the start and end of the first string that ends in it, or None.

        The first string is the one with the earliest start, and among these the shortest.
        """
        found: tuple[int, int] | None = None
        if not self._strings:
            return None
        for char in text:
            self.read += 1
            for number in self._ended_by(char):
                place = (self.read - len(self._strings[number]), self.read)
                if found is None or place < found:
                    found, self.last = place, self._strings[number]
        return found

    def _ended_by(self, char: str) -> list[int]:
        """Read a character; returns the numbers of the strings that end with it."""
        ended: list[int] = []
        matches: dict[int, int] = {}
        for number, matched in self._matched.items():
            one, borders = self._strings[number], self._borders[number]
            while matched and one[matched] != char:
                matched = borders[matched - 1]
            if one[matched] != char:
                continue
            matched += 1
            if matched == len(one):
                ended.append(number)
                matched = borders[-1]
            if matched:
                matches[number] = matched
        for number in self._by_first.get(char, ()):
            if number in self._matched:
                continue
            if len(self._strings[number]) == 1:
                ended.append(number)
            else:
                matches[number] = 1
        self._matched = matches
        return ended


def _borders(text: str) -> list[int]:
    """Return the length of the longest border (proper prefix that is also a suffix) of each prefix."""
    borders = [0] * len(text)
    matched = 0
    for place in range(1, len(text)):
        while matched and text[place] != text[matched]:
            matched = borders[matched - 1]
        matched += text[place] == text[matched]
        borders[place] = matched
    return borders
