"""The search for stop strings, against a slow one that looks at the whole text again and again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from specinfer.engine.transcript import StopStrings


def slow_held(text: str, strings: Sequence[str]) -> int:
    """The longest end of the text that a string begins with, and is more than."""
    return max(
        (
            n
            for one in strings
            for n in range(1, len(one))
            if n <= len(text) and one.startswith(text[len(text) - n :])
        ),
        default=0,
    )


def slow_found(text: str, before: int, strings: Sequence[str]) -> tuple[int, int] | None:
    """The first string that ends behind `before`: the one that begins first, then the shortest."""
    found = [
        (start, start + len(one))
        for one in strings
        for start in range(len(text) - len(one) + 1)
        if text[start:].startswith(one) and start + len(one) > before
    ]
    return min(found, default=None)


@pytest.mark.parametrize("letters", ["a", "ab", "abc"])
def test_what_is_found_and_held_is_what_a_slow_search_says(letters: str) -> None:
    draw = random.Random(letters)
    for _ in range(300):
        strings = ["".join(draw.choices(letters, k=draw.randint(1, 5))) for _ in range(draw.randint(0, 4))]
        stops, text = StopStrings(strings), ""
        for _ in range(12):
            piece = "".join(draw.choices(letters, k=draw.randint(0, 4)))
            text += piece
            found = stops.feed(piece)
            place = None if found is None else (found.start, found.end)
            assert place == slow_found(text, len(text) - len(piece), strings), (strings, text)
            assert found is None or found.string == text[found.start : found.end]
            assert stops.held == slow_held(text, strings), (strings, text)


class Counted(str):
    """A string that counts how often a text is compared with it."""

    looks = 0

    def startswith(self, *begin: Any) -> bool:
        Counted.looks += 1
        return super().startswith(*begin)


def test_the_work_grows_with_the_text_and_not_with_its_square() -> None:
    # Worst case: every character of the text may be a part of a long string.
    strings = [Counted("a" * (1000 + number) + "b") for number in range(4)]
    stops = StopStrings(strings)
    for _ in range(3):
        Counted.looks = 0
        for _ in range(2000):
            assert stops.feed("a") is None
        assert Counted.looks <= 2000 * len(strings) * 2
    assert stops.held == 1003
