"""An index in native memory holds, finds and counts what one in plain Python does."""

from __future__ import annotations

import gc
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.native_text_index import NativeTextIndex
from specinfer.speculate.lookups.plain_text_index import PlainTextIndex
from specinfer.speculate.lookups.text_index import TextIndex
from tests.kernels import library_or_skip
from tests.sizes import malloced


def said(count: int, seed: int) -> list[int]:
    """A text of so few tokens that it repeats itself."""
    return random.Random(seed).choices(range(3), k=count)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True)
TOKENS = st.builds(said, st.integers(0, 70), st.integers(0, 99))
EVENTS = st.lists(st.one_of(TOKENS, st.just("close"), st.just("drop")), min_size=2, max_size=14)


@pytest.fixture(scope="module")
def library() -> Library:
    return library_or_skip()


def say(index: TextIndex, event: list[int] | str) -> None:
    if isinstance(event, list):
        index.extend(event)
    elif event == "close":
        index.close_text()
    elif index.num_texts:
        index.drop_oldest_text()


@given(EVENTS, LENGTHS, st.sampled_from([None, 0, 1, 40]), TOKENS, st.integers(0, 90))
def test_it_holds_finds_and_counts_the_same(
    library: Library,
    events: list[list[int] | str],
    lengths: list[int],
    longest_stretch: int | None,
    tail: list[int],
    most: int,
) -> None:
    plain = PlainTextIndex(lengths, longest_stretch=longest_stretch)
    native = NativeTextIndex(library, lengths, longest_stretch=longest_stretch)
    end = 0
    for event in events:
        assert native.bytes_with(most) == plain.bytes_with(most)
        for index in (plain, native):
            say(index, event)
            index.check_integrity()
        end += len(event) if isinstance(event, list) else event == "close"
        for figure in ("lengths", "num_tokens", "num_texts", "num_bytes"):
            assert getattr(native, figure) == getattr(plain, figure), figure
    looked_for = array("i", tail)
    assert native.tail(most) == plain.tail(most)
    assert native.newest_text() == plain.newest_text()
    assert native.occurrences(looked_for, most) == plain.occurrences(looked_for, most)
    for length in lengths:
        assert native.places(looked_for, length, most) == [*plain.places(looked_for, length, most)]
    for position in range(end - plain.num_tokens, end + 1):
        assert native.following(position, most) == plain.following(position, most)


@pytest.mark.parametrize("sizes", [(40, 30), (31, 2, 100), (100, 99, 5), (10, 300, 300)])
@pytest.mark.parametrize("longest_stretch", [None, 50])
def test_their_stretches_begin_where_the_other_ones_do(
    library: Library, sizes: tuple[int, ...], longest_stretch: int | None
) -> None:
    plain = PlainTextIndex(longest_stretch=longest_stretch)
    native = NativeTextIndex(library, longest_stretch=longest_stretch)
    for size in sizes:
        for index in (plain, native):
            index.extend(said(size, size))
            index.check_integrity()
        assert native.num_bytes == plain.num_bytes


def both(library: Library) -> tuple[TextIndex, TextIndex]:
    return PlainTextIndex(), NativeTextIndex(library)


def test_what_cannot_be_is_refused_by_both_and_changes_nothing(library: Library) -> None:
    for index in both(library):
        index.extend([1, 2, 3])
        with pytest.raises(ValueError, match="token -1; tokens are 0 or more"):
            index.extend([4, -1])
        with pytest.raises(OverflowError):
            index.extend([1 << 31])
        with pytest.raises(IndexError, match="no text is closed"):
            index.drop_oldest_text()
        with pytest.raises(ValueError, match="n-grams of 3 tokens are not looked up"):
            [*index.places(array("i", [1, 2, 3]), 3, 9)]
        assert index.newest_text() == array("i", [1, 2, 3])
        index.check_integrity()


@pytest.mark.parametrize("lengths", [(), (0, 1), (-1,)])
def test_lengths_that_no_ngram_has_are_refused_by_both(library: Library, lengths: tuple[int, ...]) -> None:
    for make in (PlainTextIndex, lambda lengths: NativeTextIndex(library, lengths)):
        with pytest.raises(ValueError, match="allowed: one length or more, each 1 or more"):
            make(lengths)


def test_no_position_and_no_number_leads_out_of_its_memory(library: Library) -> None:
    index = NativeTextIndex(library)
    index.extend(range(100))
    index.close_text()
    index.drop_oldest_text()
    index.extend([7, 7, 7])
    for position in (-(1 << 62), -1, 0, 100, 104, 105, 1 << 62):
        assert len(index.following(position, 1 << 62)) == max(0, 104 - position) * (position > 100)
    for most in (-(1 << 62), -1, 0):
        assert index.places(array("i", [7]), 1, most) == index.occurrences(array("i", [7]), most) == []
    assert index.occurrences(array("i", [7]), 1 << 62) == [(103, 1), (102, 1)]
    assert index.occurrences(array("i"), 9) == [] == index.places(array("i"), 1, 9)
    assert index.bytes_with(1 << 62) > 1 << 31
    assert index.bytes_with(-5) == index.bytes_with(0)
    index.check_integrity()


@pytest.mark.parametrize(("texts", "tokens"), [(300, 0), (300, 3), (100, 100), (20, 3000)])
def test_the_bytes_it_says_are_those_it_takes_at_most(library: Library, texts: int, tokens: int) -> None:
    texts_said = [array("i", [(i * i + j * j) % 1009 for j in range(tokens)]) for i in range(texts)]
    kept: list[NativeTextIndex] = [NativeTextIndex(library) for _ in range(texts)]
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
    told = sum(index.num_bytes for index in kept)
    assert 0.4 * told <= taken <= told
    index = kept[0]
    kept.clear()
    gc.collect()
    assert (malloced() or 0) - before < 0.1 * told, "indexes that nobody holds give their memory back"
    index.check_integrity()
