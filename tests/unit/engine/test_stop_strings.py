"""The search for stop strings, against a slow one that looks at the whole text again and again."""

from __future__ import annotations

import random
from collections.abc import Sequence

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
            assert stops.feed(piece) == slow_found(text, len(text) - len(piece), strings), (strings, text)
            assert stops.held == slow_held(text, strings), (strings, text)


class Counted(str):
    """A string that counts how often a character of it is looked at."""

    looks = 0

    def __getitem__(self, place: object) -> str:
        Counted.looks += 1
        return super().__getitem__(place)  # type: ignore[index]


def test_the_work_grows_with_the_text_and_not_with_its_square() -> None:
    # Worst case: every character of the text may be a part of a long string.
    strings = [Counted("a" * (1000 + number) + "b") for number in range(4)]
    stops = StopStrings(strings)
    looks = []
    for _ in range(3):
        Counted.looks = 0
        for _ in range(2000):
            assert stops.feed("a") is None
        looks.append(Counted.looks)
    assert max(looks) < 2000 * len(strings) * 4  # a few looks for each character and string in progress
    assert stops.held == 1003


def test_strings_that_are_not_begun_cost_nothing() -> None:
    strings = [Counted(f"{chr(0x4E00 + number)} and so on") for number in range(5000)]
    stops = StopStrings(strings)
    Counted.looks = 0
    assert stops.feed("plain text " * 1000) is None
    assert Counted.looks == 0
    assert stops.feed(f"x{chr(0x4E00 + 7)} and so on.") == (11001, 11012)
