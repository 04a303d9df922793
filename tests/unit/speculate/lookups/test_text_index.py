"""The index of n-grams against a search that looks everywhere; each letter is a token."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.lookups.plain_text_index import PlainTextIndex
from specinfer.speculate.lookups.text_index import LENGTHS, NewIndex, TextIndex
from tests.sizes import bytes_of


def letters(text: str) -> array[int]:
    return array("i", [ord(c) for c in text])


def index_of(new_index: NewIndex, *closed: str, growing: str = "") -> TextIndex:
    index = new_index()
    for text in closed:
        index.extend(letters(text))
        index.close_text()
    index.extend(letters(growing))
    index.check_integrity()
    return index


def found(index: TextIndex, tail: str, limit: int = 10) -> list[tuple[str, int]]:
    """What follows each occurrence, three letters of it, and the letters matched."""
    places = index.occurrences(letters(tail), limit)
    return [("".join(map(chr, index.following(place, 3))), matched) for place, matched in places]


def test_newer_places_come_first(new_index: NewIndex) -> None:
    assert found(index_of(new_index, growing="ab1ab2ab3ab"), "b") == [("3ab", 1), ("2ab", 1), ("1ab", 1)]


def test_longer_ngrams_come_first_and_matches_are_counted_to_the_end_of_the_tail(new_index: NewIndex) -> None:
    index = index_of(new_index, growing="xyzab1--ab2--zab3--b4--")
    assert found(index, "yzab") == [("1--", 4), ("3--", 3), ("2--", 2), ("4--", 1)]


def test_at_most_limit_places_are_named(new_index: NewIndex) -> None:
    assert found(index_of(new_index, growing="ab1ab2ab3ab"), "b", limit=2) == [("3ab", 1), ("2ab", 1)]


def test_the_end_of_a_text_is_no_place_since_nothing_follows(new_index: NewIndex) -> None:
    assert found(index_of(new_index, "ab"), "b") == []
    assert found(index_of(new_index, growing="ab"), "b") == []


def test_neither_matches_nor_guesses_cross_from_one_text_into_the_next(new_index: NewIndex) -> None:
    index = index_of(new_index, "1a", "b2", growing="ab3")
    assert found(index, "ab") == [("3", 2), ("2", 1)]
    assert found(index, "a") == [("b3", 1)]


def test_tail_and_newest_text_are_those_of_the_growing_text(new_index: NewIndex) -> None:
    index = index_of(new_index, "abc", growing="defg")
    assert index.tail(2) == letters("fg")
    assert index.tail(99) == letters("defg")
    assert index.newest_text() == letters("defg")
    assert (index.num_tokens, index.num_texts) == (8, 1)


def test_a_dropped_text_leaves_nothing_and_younger_texts_stay(new_index: NewIndex) -> None:
    index = index_of(new_index, "ab1", "ab2", "cd3")
    assert index.drop_oldest_text() == 4
    index.check_integrity()
    assert found(index, "ab") == [("2", 2)]
    assert index.drop_oldest_text() == 4
    index.check_integrity()
    assert found(index, "ab") == []
    assert found(index, "cd") == [("3", 2)]
    assert (index.num_tokens, index.num_texts) == (4, 1)


def test_at_most_so_many_places_are_visited_the_ends_of_texts_among_them(new_index: NewIndex) -> None:
    index = index_of(new_index, "xa", "ya", growing="a1a2a3")
    assert list(index.places(letters("a"), 1, 10)) == [11, 9, 7, 5, 2]
    assert list(index.places(letters("a"), 1, 4)) == [11, 9, 7, 5]
    assert list(index.places(letters("a"), 2, 4)) == [], "longer than what is looked for"
    assert list(index.places(letters("xa"), 2, 0)) == []


def test_the_lengths_that_are_looked_up_can_be_chosen(new_index: NewIndex) -> None:
    index = new_index((3, 1))
    index.extend(letters("xab1yab2zb3xab"))
    assert found(index, "xab") == [("1ya", 3), ("3xa", 1), ("2zb", 2)]


LETTERS = st.integers(0, 2)
TEXTS = st.lists(st.lists(LETTERS, max_size=60), max_size=6)  # of several stretches


@given(
    TEXTS, st.integers(0, 5), st.lists(LETTERS, max_size=12), st.integers(1, 6), st.sampled_from([None, 1])
)
def test_it_finds_what_looking_everywhere_finds(
    new_index: NewIndex,
    texts: list[list[int]],
    drops: int,
    tail: list[int],
    limit: int,
    longest_stretch: int | None,
) -> None:
    index = new_index(longest_stretch=longest_stretch)
    for text in texts:
        for half in (text[: len(text) // 3], text[len(text) // 3 :]):
            index.extend(half)
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


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 3), max_size=80), st.none()), max_size=12),
    st.sampled_from([None, 1, 40]),
)
def test_bytes_are_known_before_a_text_is_added(
    new_index: NewIndex, happenings: list[list[int] | None], longest_stretch: int | None
) -> None:
    index = new_index(longest_stretch=longest_stretch)
    for text in happenings:  # a text is added and closed, or the oldest is dropped
        if text is not None:
            most = index.bytes_with(len(text))
            index.extend(text)
            index.close_text()
            assert index.num_bytes <= most
        elif index.num_texts:
            before = index.num_bytes
            index.drop_oldest_text()
            assert index.num_bytes <= before
        index.check_integrity()


@pytest.mark.parametrize(("texts", "tokens"), [(200, 0), (200, 3), (50, 100), (5, 1000), (1, 5000)])
def test_bytes_are_those_that_python_takes(texts: int, tokens: int) -> None:
    said = [array("i", [(i * i + j * j) % 1009 for j in range(tokens)]) for i in range(texts)]
    together, alone = PlainTextIndex(), []
    for text in said:
        index = PlainTextIndex()
        for one in (together, index):
            one.extend(text)
            one.close_text()
        alone.append(index)
    taken = bytes_of(together)
    assert taken <= together.num_bytes <= 1.1 * taken + 1000
    assert together.num_bytes <= 105 * together.num_tokens + 6000
    taken = bytes_of(*alone)
    assert taken <= sum(index.num_bytes for index in alone) <= 1.3 * taken


@pytest.mark.parametrize("alphabet", [1, 50, 100_000])
def test_a_long_text_takes_as_much_whatever_it_says(alphabet: int) -> None:
    said = random.Random(0)
    index = PlainTextIndex()
    index.extend([said.randrange(alphabet) for _ in range(30_000)])  # a prompt
    assert 52 * 30_000 < bytes_of(index) <= 53 * 30_000
    for number in range(200):  # and an answer, for which a stretch as long as the prompt begins
        index.extend([number])
        assert bytes_of(index) <= index.num_bytes <= 101 * 30_000


def test_a_text_that_has_left_leaves_its_memory(new_index: NewIndex) -> None:
    index = new_index(longest_stretch=100)
    sizes = []
    for number in range(200):
        index.extend([(number + i) % 7 for i in range(50)])
        index.close_text()
        if index.num_texts > 20:
            index.drop_oldest_text()
        sizes.append(index.num_bytes)
    assert max(sizes[20:]) <= 1.3 * max(sizes[:20])


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
