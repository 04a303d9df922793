"""StopStrings: finds where one of several strings first stands in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Reads a text once, character by character, and knows which strings it may be in the middle of.

    For each of these it keeps how many of the string's characters the text ends with (the search of Knuth,
    Morris and Pratt). A character costs one look at the strings that begin with it, and one at those in
    progress, however long the text and the strings are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = list(dict.fromkeys(strings))
        self._borders = [_borders(one) for one in self._strings]
        self._by_first: dict[str, list[int]] = {}  # a character -> the strings that begin with it
        for number, one in enumerate(self._strings):
            self._by_first.setdefault(one[0], []).append(number)
        self._begun: dict[int, int] = {}  # a string's number -> how many of its characters the text ends with
        self.read = 0  # characters of the text so far

    @property
    def held(self) -> int:
        """How many characters at the text's end may be the beginning of a string."""
        return max(self._begun.values(), default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Read what the text has gained; where the first string lies that ends in it, as start and end.

        The first is the one that begins first, and of several that begin there the shortest. None: no string
        ends in it.
        """
        found: tuple[int, int] | None = None
        if not self._strings:
            return None
        for char in text:
            self.read += 1
            for number in self._ended_by(char):
                place = (self.read - len(self._strings[number]), self.read)
                found = place if found is None else min(found, place)
        return found

    def _ended_by(self, char: str) -> list[int]:
        """The numbers of the strings that end with this next character."""
        ended: list[int] = []
        begun: dict[int, int] = {}
        for number, matched in self._begun.items():
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
                begun[number] = matched
        for number in self._by_first.get(char, ()):
            if number in self._begun:
                continue
            if len(self._strings[number]) == 1:
                ended.append(number)
            else:
                begun[number] = 1
        self._begun = begun
        return ended


def _borders(text: str) -> list[int]:
    """For each beginning of the text, how long its longest proper beginning is that it also ends with."""
    borders = [0] * len(text)
    matched = 0
    for place in range(1, len(text)):
        while matched and text[place] != text[matched]:
            matched = borders[matched - 1]
        matched += text[place] == text[matched]
        borders[place] = matched
    return borders
