"""Texts by cache key, bounded together; each letter is a token."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.answer_store import AnswerStore
from tests.oracles.lookup_trees import occurrences


def letters(text: str) -> array[int]:
    return array("i", [ord(c) for c in text])


def after(store: AnswerStore, key: str | None, tail: str) -> list[str]:
    """Return the continuations of `tail` in the texts of a key."""
    store.check_integrity()
    index = store.of(key)
    if index is None:
        return []
    texts = [text for _, text in index.texts()]
    found = occurrences(texts, [*letters(tail)], 1, 100)
    return ["".join(map(chr, text[stop:])) for stop, text, _ in found]


def room_for(library: Library, *keys: str) -> int:
    """The memory that is needed for a short text of each key."""
    store = AnswerStore(1 << 20, library)
    for key in keys:
        store.add(key, letters("abc"))
    return store.num_bytes + 200  # as a text's bytes are not known exactly before it is added


def test_a_key_sees_its_own_texts_only(library: Library) -> None:
    store = AnswerStore(1 << 16, library)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add(None, letters("ab3"))
    assert after(store, "mine", "ab") == ["1"]
    assert after(store, "yours", "ab") == ["2"]
    assert after(store, None, "ab") == ["3"]
    assert after(store, "None", "ab") == []


def test_the_oldest_text_of_any_key_leaves_whole(library: Library) -> None:
    store = AnswerStore(room_for(library, "mine", "yours"), library)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add("mine", letters("ab3"))  # costs next to nothing while a segment has room
    assert after(store, "mine", "ab") == ["3", "1"]
    store.add("other", letters("ab4"))
    assert after(store, "mine", "ab") == ["3"]
    assert after(store, "yours", "ab") == []
    assert after(store, "other", "ab") == ["4"]


def test_a_key_without_texts_is_forgotten(library: Library) -> None:
    store = AnswerStore(room_for(library, "mine"), library)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    assert store.of("mine") is None
    assert after(store, "yours", "ab") == ["2"]


def test_of_a_text_that_is_too_long_the_end_stays(library: Library) -> None:
    store = AnswerStore(8000, library)
    store.add(None, array("i", range(1000)))
    index = store.of(None)
    assert index is not None
    kept = index.num_tokens - 1
    assert 50 < kept < 200
    assert index.texts()[0] == (0, [*range(1000 - kept, 1000)])
    store.check_integrity()


def test_without_memory_nothing_is_kept(library: Library) -> None:
    for memory in (0, 1, 1000):
        store = AnswerStore(memory, library)
        store.add(None, letters("abc"))
        store.check_integrity()
        assert store.of(None) is None


def test_a_key_longer_than_the_memory_keeps_nothing_and_costs_nobody_anything(library: Library) -> None:
    store = AnswerStore(1 << 14, library)
    store.add("mine", letters("ab1"))
    store.add("k" * (1 << 14), letters("ab2"))
    store.check_integrity()
    assert after(store, "mine", "ab") == ["1"]


def test_an_empty_text_is_not_kept(library: Library) -> None:
    store = AnswerStore(1 << 16, library)
    store.add(None, letters(""))
    store.check_integrity()
    assert store.num_bytes == 0


ADDED = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.integers(0, 90)), max_size=30)


@given(ADDED, st.integers(0, 20_000))
def test_what_is_held_are_the_newest_texts_within_the_memory(
    library: Library, added: list[tuple[str | None, int]], memory: int
) -> None:
    store = AnswerStore(memory, library)
    kept: list[tuple[str | None, int]] = []  # key and size of stored texts
    for key, size in added:
        text = array("i", range(size))
        store.add(key, text)
        store.check_integrity()
        alone = AnswerStore(memory, library)
        alone.add(key, text)
        if (index := alone.of(key)) is not None:
            kept.append((key, index.num_tokens))
        held = {k: index for k in ("x", "y", None) if (index := store.of(k)) is not None}
        newest = kept[len(kept) - sum(index.num_texts for index in held.values()) :]
        assert newest[-1:] == kept[-1:], "the newest is there"
        for owner, index in held.items():
            sizes = [size for k, size in newest if k == owner]
            assert (index.num_texts, index.num_tokens) == (len(sizes), sum(sizes))


@pytest.mark.parametrize(
    ("keys", "length", "used"),
    [(1, 100, 0.8), (1, 8, 0.8), (1, 500, 0.6), (10, 200, 0.8), (10_000, 5, 0.9), (3, 30_000, 0.95)],
)
def test_a_full_memory_takes_what_it_may_and_is_used(
    library: Library, keys: int, length: int, used: float
) -> None:
    memory = 1 << 17
    texts = [array("i", [(i * i + j * j) % 1009 for j in range(length)]) for i in range(7)]
    adds = 2 * (memory // (50 * length) + 1)
    store = AnswerStore(memory, library)
    least = memory
    for number in range(adds):
        store.add(f"key {number % keys}", texts[number % 7])
        if number >= adds // 2:
            least = min(least, store.num_bytes)
    store.check_integrity()
    assert least >= used * memory


def test_a_key_is_held_once_however_many_texts_come_with_it(library: Library) -> None:
    store = AnswerStore(1 << 18, library)
    for number in range(100):
        store.add("k" * 20_000 if number else "k" * 19_999 + "k", array("i", [number]))
    assert 20_000 <= store.num_bytes <= 1 << 16
    assert len(store._ages) == 100
