"""The texts and bytes of an index; test_lookup.py compares its matches with a search everywhere."""

from __future__ import annotations

import ctypes
import gc
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.answer_store import AnswerStore
from specinfer.speculate.lookups.text_index import TextIndex


class Mallinfo(ctypes.Structure):
    """glibc's heap statistics, as malloc.h defines them."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloced() -> int | None:
    """Return the bytes in use by malloc, or None without glibc."""
    asked = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if asked is None:
        return None
    asked.restype = Mallinfo
    found = asked()
    return int(found.uordblks + found.hblkhd)


def said(count: int, seed: int) -> list[int]:
    """A text of so few tokens that it repeats itself."""
    return random.Random(seed).choices(range(3), k=count)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True)
TOKENS = st.builds(said, st.integers(0, 70), st.integers(0, 99))
EVENTS = st.lists(st.one_of(TOKENS, st.just("close"), st.just("drop")), min_size=2, max_size=14)


@given(EVENTS, LENGTHS, st.sampled_from([None, 0, 1, 40]))
def test_it_holds_what_a_list_of_texts_does(
    library: Library, events: list[list[int] | str], lengths: list[int], max_segment: int | None
) -> None:
    index = TextIndex(library, lengths, max_segment=max_segment)
    texts = [list[int]()]
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
            assert index.drop_oldest_text() == len(texts.pop(0)) + 1
            assert index.num_bytes <= before
        assert index.texts() == texts
        assert index.newest_text() == array("i", texts[-1])
        assert (index.num_texts, index.num_tokens) == (len(texts) - 1, sum(map(len, texts)) + len(texts) - 1)


def test_what_cannot_be_is_refused_and_changes_nothing(library: Library) -> None:
    index = TextIndex(library)
    index.extend([1, 2, 3])
    with pytest.raises(ValueError, match="token -1; tokens are 0 or more"):
        index.extend([4, -1])
    with pytest.raises(OverflowError):
        index.extend([1 << 31])
    with pytest.raises(IndexError, match="no text is closed"):
        index.drop_oldest_text()
    assert index.newest_text() == array("i", [1, 2, 3])


def test_no_number_leads_out_of_its_memory(library: Library) -> None:
    index = TextIndex(library)
    index.extend(range(100))
    index.close_text()
    index.drop_oldest_text()
    assert index.bytes_with(1 << 62) > 1 << 31
    assert index.bytes_with(-5) == index.bytes_with(0)


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


# Answers that are kept.


ADDED = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.integers(0, 90)), max_size=30)


@given(ADDED, st.integers(0, 20_000))
def test_the_newest_are_held(library: Library, added: list[tuple[str | None, int]], memory: int) -> None:
    store = AnswerStore(memory, library)
    kept: list[tuple[str | None, int]] = []  # key and size of stored texts
    for key, size in added:
        text = array("i", range(size))
        store.add(key, text)
        alone = AnswerStore(memory, library)
        alone.add(key, text)
        if (index := alone.of(key)) is not None:
            kept.append((key, index.num_tokens))
        held = {k: index for k in ("x", "y", None) if (index := store.of(k)) is not None}
        assert store._num_bytes == sum(map(store._bytes_of, held)) <= memory
        newest = kept[len(kept) - sum(index.num_texts for index in held.values()) :]
        assert newest[-1:] == kept[-1:], "the newest is there"
        for owner, index in held.items():
            sizes = [size for k, size in newest if k == owner]
            assert (index.num_texts, index.num_tokens) == (len(sizes), sum(sizes))
