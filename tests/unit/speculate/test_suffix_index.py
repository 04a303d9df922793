"""The index of n-grams against a search that looks everywhere; each letter is a token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.suffix_index import LENGTHS, SuffixIndex


def letters(text: str) -> array[int]:
    return array("i", [ord(c) for c in text])


def index_of(*closed: str, growing: str = "") -> SuffixIndex:
    index = SuffixIndex()
    for text in closed:
        index.extend(letters(text))
        index.close_text()
    index.extend(letters(growing))
    index.check_integrity()
    return index


def found(index: SuffixIndex, tail: str, limit: int = 10) -> list[tuple[str, int]]:
    """What follows each occurrence, three letters of it, and the letters matched."""
    places = index.occurrences(letters(tail), limit)
    return [("".join(map(chr, index.following(place, 3))), matched) for place, matched in places]


def test_newer_places_come_first() -> None:
    assert found(index_of(growing="ab1ab2ab3ab"), "b") == [("3ab", 1), ("2ab", 1), ("1ab", 1)]


def test_longer_ngrams_come_first_and_matches_are_counted_to_the_end_of_the_tail() -> None:
    index = index_of(growing="xyzab1--ab2--zab3--b4--")
    assert found(index, "yzab") == [("1--", 4), ("3--", 3), ("2--", 2), ("4--", 1)]


def test_at_most_limit_places_are_named() -> None:
    assert found(index_of(growing="ab1ab2ab3ab"), "b", limit=2) == [("3ab", 1), ("2ab", 1)]


def test_the_end_of_a_text_is_no_place_since_nothing_follows() -> None:
    assert found(index_of("ab"), "b") == []
    assert found(index_of(growing="ab"), "b") == []


def test_neither_matches_nor_guesses_cross_from_one_text_into_the_next() -> None:
    index = index_of("1a", "b2", growing="ab3")
    assert found(index, "ab") == [("3", 2), ("2", 1)]
    assert found(index, "a") == [("b3", 1)]


def test_tail_and_newest_text_are_those_of_the_growing_text() -> None:
    index = index_of("abc", growing="defg")
    assert index.tail(2) == letters("fg")
    assert index.tail(99) == letters("defg")
    assert index.newest_text() == letters("defg")
    assert (index.num_tokens, index.num_texts) == (8, 1)


def test_a_dropped_text_leaves_nothing_and_younger_texts_stay() -> None:
    index = index_of("ab1", "ab2", "cd3")
    assert index.drop_oldest_text() == 4
    index.check_integrity()
    assert found(index, "ab") == [("2", 2)]
    assert index.drop_oldest_text() == 4
    index.check_integrity()
    assert found(index, "ab") == []
    assert found(index, "cd") == [("3", 2)]
    assert (index.num_tokens, index.num_texts) == (4, 1)


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=5)


@given(TEXTS, st.integers(0, 5), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 6))
def test_it_finds_what_looking_everywhere_finds(
    texts: list[list[int]], drops: int, tail: list[int], limit: int
) -> None:
    index = SuffixIndex()
    for text in texts:
        index.extend(text)
        index.close_text()
    kept = texts[min(drops, len(texts)) :]
    for _ in range(len(texts) - len(kept)):
        index.drop_oldest_text()
        index.check_integrity()
    places = index.occurrences(array("i", tail), 1000)
    told = [(list(index.following(place, 1000)), matched) for place, matched in places]
    assert told == by_looking_everywhere(kept, tail)
    few = index.occurrences(array("i", tail), limit)
    assert len(few) <= limit
    assert few == [place for place in places if place in few], "fewer of the same, in the same order"


def by_looking_everywhere(texts: Sequence[list[int]], tail: list[int]) -> list[tuple[list[int], int]]:
    told: dict[tuple[int, int], tuple[list[int], int]] = {}
    for n in reversed(LENGTHS):
        for t, text in reversed(list(enumerate(texts))):
            for stop in range(len(text) - 1, 0, -1):
                matched = common_suffix(text[:stop], tail)
                if matched >= n:
                    told.setdefault((t, stop), (text[stop:], matched))
    return list(told.values())


def common_suffix(a: list[int], b: list[int]) -> int:
    longest = min(len(a), len(b))
    return max(n for n in range(longest + 1) if a[len(a) - n :] == b[len(b) - n :])
