"""The index of n-grams against a search that looks everywhere; each letter is a token."""

from __future__ import annotations

import gc
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.text_index import TextIndex
from tests.sizes import malloced


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def index_of(library: Library, *closed: str, growing: str = "") -> TextIndex:
    index = TextIndex(library)
    for text in closed:
        index.extend(letters(text))
        index.close_text()
    index.extend(letters(growing))
    index.check_integrity()
    return index


def test_places_are_found_newest_first_the_ends_of_texts_among_them(library: Library) -> None:
    index = index_of(library, "xa", "ya", growing="a1a2a3")
    assert index.places(letters("a"), 1, 10) == [11, 9, 7, 5, 2]
    assert index.places(letters("a"), 1, 4) == [11, 9, 7, 5]
    assert index.places(letters("xa"), 2, 4) == [2]
    assert index.places(letters("a"), 2, 4) == [], "longer than what is looked for"
    assert index.places(letters("xa"), 2, 0) == []
    assert index.places(letters("aa"), 2, 4) == [], "no n-gram crosses from one text into the next"


def test_a_dropped_text_leaves_nothing_and_younger_texts_stay(library: Library) -> None:
    index = index_of(library, "ab1", "ab2", "cd3")
    assert index.drop_oldest_text() == 4
    index.check_integrity()
    assert index.places(letters("ab"), 2, 9) == [6]
    assert index.drop_oldest_text() == 4
    index.check_integrity()
    assert index.places(letters("ab"), 2, 9) == []
    assert index.places(letters("cd"), 2, 9) == [10]
    assert (index.num_tokens, index.num_texts) == (4, 1)


def said(count: int, seed: int) -> list[int]:
    """A text of so few tokens that it repeats itself."""
    return random.Random(seed).choices(range(3), k=count)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True)
TOKENS = st.builds(said, st.integers(0, 70), st.integers(0, 99))
EVENTS = st.lists(st.one_of(TOKENS, st.just("close"), st.just("drop")), min_size=2, max_size=14)


@given(EVENTS, LENGTHS, st.sampled_from([None, 0, 1, 40]), TOKENS, st.integers(0, 90))
def test_it_holds_and_finds_what_a_list_of_texts_does(
    library: Library,
    events: list[list[int] | str],
    lengths: list[int],
    max_segment: int | None,
    tail: list[int],
    most: int,
) -> None:
    index = TextIndex(library, lengths, max_segment=max_segment)
    base, texts = 0, [list[int]()]
    for event in events:
        before, most_bytes = index.num_bytes, index.bytes_with(len(event))
        if isinstance(event, list):
            index.extend(event)
            texts[-1] += event
            assert index.num_bytes <= most_bytes
        elif event == "close":
            index.close_text()
            texts.append([])
        elif len(texts) > 1:
            base += index.drop_oldest_text()
            del texts[0]
            assert index.num_bytes <= before
        index.check_integrity()
        assert [text for _, text in index.texts()] == texts
        assert index.texts()[0][0] == base
        assert index.newest_text() == array("i", texts[-1])
        assert (index.num_texts, index.num_tokens) == (len(texts) - 1, sum(map(len, texts)) + len(texts) - 1)
    for length in lengths:
        found = [
            start + stop
            for start, text in reversed(index.texts())
            for stop in range(len(text), length - 1, -1)
            if len(tail) >= length and text[stop - length : stop] == tail[len(tail) - length :]
        ]
        assert index.places(tail, length, most) == found[:most]


def test_what_cannot_be_is_refused_and_changes_nothing(library: Library) -> None:
    index = TextIndex(library)
    index.extend([1, 2, 3])
    with pytest.raises(ValueError, match="token -1; tokens are 0 or more"):
        index.extend([4, -1])
    with pytest.raises(OverflowError):
        index.extend([1 << 31])
    with pytest.raises(IndexError, match="no text is closed"):
        index.drop_oldest_text()
    with pytest.raises(ValueError, match="n-grams of 3 tokens are not looked up"):
        index.places([1, 2, 3], 3, 9)
    assert index.newest_text() == array("i", [1, 2, 3])
    index.check_integrity()


def test_no_number_leads_out_of_its_memory(library: Library) -> None:
    index = TextIndex(library)
    index.extend(range(100))
    index.close_text()
    index.drop_oldest_text()
    index.extend([7, 7, 7])
    for most in (-(1 << 62), -1, 0):
        assert index.places([7], 1, most) == []
    assert index.places([7], 1, 1 << 62) == [104, 103, 102]
    assert index.places([], 1, 9) == []
    assert index.bytes_with(1 << 62) > 1 << 31
    assert index.bytes_with(-5) == index.bytes_with(0)
    index.check_integrity()


@pytest.mark.parametrize(("texts", "tokens"), [(300, 0), (300, 3), (100, 100), (20, 3000)])
def test_the_bytes_it_says_are_those_it_takes_at_most(library: Library, texts: int, tokens: int) -> None:
    texts_said = [array("i", [(i * i + j * j) % 1009 for j in range(tokens)]) for i in range(texts)]
    kept: list[TextIndex] = [TextIndex(library) for _ in range(texts)]
    gc.collect()
    before = malloced()
    if before is None:
        pytest.skip("this malloc does not say what it has given out")
    for index, text in zip(kept, texts_said, strict=True):
        for _ in range(3):
            index.extend(text)
            index.close_text()
        index.drop_oldest_text()
    taken = (malloced() or 0) - before
    counted = sum(index.num_bytes for index in kept)
    assert 0.4 * counted <= taken <= counted
    index = kept[0]
    kept.clear()
    gc.collect()
    assert (malloced() or 0) - before < 0.1 * counted, "indexes that nobody holds give their memory back"
    index.check_integrity()
