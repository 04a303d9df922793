"""Texts by cache key, bounded together; each letter is a token."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.lookups.suffix_store import SuffixStore
from specinfer.speculate.lookups.text_index import NewIndex
from tests.sizes import bytes_of


def letters(text: str) -> array[int]:
    return array("i", [ord(c) for c in text])


def after(store: SuffixStore, key: str | None, tail: str) -> list[str]:
    """What followed `tail` in the texts of a key."""
    store.check_integrity()
    index = store.of(key)
    if index is None:
        return []
    places = index.occurrences(letters(tail), 100)
    return ["".join(map(chr, index.following(place, 100))) for place, _ in places]


def room_for(new_index: NewIndex, *keys: str) -> int:
    """The memory that is needed for a short text of each key."""
    store = SuffixStore(1 << 20, new_index)
    for key in keys:
        store.add(key, letters("abc"))
    return store.num_bytes + 200  # as a text's bytes are not known exactly before it is added


def test_a_key_sees_its_own_texts_only(new_index: NewIndex) -> None:
    store = SuffixStore(1 << 16, new_index)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add(None, letters("ab3"))
    assert after(store, "mine", "ab") == ["1"]
    assert after(store, "yours", "ab") == ["2"]
    assert after(store, None, "ab") == ["3"]
    assert after(store, "None", "ab") == []


def test_the_oldest_text_of_any_key_leaves_whole(new_index: NewIndex) -> None:
    store = SuffixStore(room_for(new_index, "mine", "yours"), new_index)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add("mine", letters("ab3"))  # costs next to nothing while a stretch has room
    assert after(store, "mine", "ab") == ["3", "1"]
    store.add("other", letters("ab4"))
    assert after(store, "mine", "ab") == ["3"]
    assert after(store, "yours", "ab") == []
    assert after(store, "other", "ab") == ["4"]


def test_a_key_without_texts_is_forgotten(new_index: NewIndex) -> None:
    store = SuffixStore(room_for(new_index, "mine"), new_index)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    assert store.of("mine") is None
    assert after(store, "yours", "ab") == ["2"]


def test_of_a_text_that_is_too_long_the_end_stays(new_index: NewIndex) -> None:
    store = SuffixStore(8000, new_index)
    store.add(None, array("i", range(1000)))
    index = store.of(None)
    assert index is not None
    kept = index.num_tokens - 1
    assert 50 < kept < 200
    assert index.occurrences(array("i", [998]), 9) != []
    assert index.occurrences(array("i", [999 - kept]), 9) == []
    assert index.occurrences(array("i", [1000 - kept]), 9) != []
    store.check_integrity()


def test_without_memory_nothing_is_kept(new_index: NewIndex) -> None:
    for memory in (0, 1, 1000):
        store = SuffixStore(memory, new_index)
        store.add(None, letters("abc"))
        store.check_integrity()
        assert store.of(None) is None


def test_a_key_longer_than_the_memory_keeps_nothing_and_costs_nobody_anything(new_index: NewIndex) -> None:
    store = SuffixStore(1 << 14, new_index)
    store.add("mine", letters("ab1"))
    store.add("k" * (1 << 14), letters("ab2"))
    store.check_integrity()
    assert after(store, "mine", "ab") == ["1"]


def test_an_empty_text_is_not_kept(new_index: NewIndex) -> None:
    store = SuffixStore(1 << 16, new_index)
    store.add(None, letters(""))
    store.check_integrity()
    assert store.num_bytes == 0


ADDED = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.integers(0, 90)), max_size=30)


@given(ADDED, st.integers(0, 20_000))
def test_what_is_held_are_the_newest_texts_within_the_memory(
    new_index: NewIndex, added: list[tuple[str | None, int]], memory: int
) -> None:
    store = SuffixStore(memory, new_index)
    kept: list[tuple[str | None, int]] = []  # key and size of what was held once
    for key, size in added:
        text = array("i", range(size))
        store.add(key, text)
        store.check_integrity()
        alone = SuffixStore(memory, new_index)
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
    new_index: NewIndex, keys: int, length: int, used: float
) -> None:
    memory = 1 << 17
    texts = [array("i", [(i * i + j * j) % 1009 for j in range(length)]) for i in range(7)]
    adds = 2 * (memory // (50 * length) + 1)
    store = SuffixStore(memory, new_index)
    least = memory
    for number in range(adds):
        store.add(f"key {number % keys}", texts[number % 7])
        if number >= adds // 2:
            least = min(least, store.num_bytes)
    store.check_integrity()
    assert bytes_of(store) <= memory
    assert least >= used * memory


def test_a_key_is_held_once_however_many_texts_come_with_it() -> None:
    store = SuffixStore(1 << 18)
    for number in range(100):
        store.add("k" * 20_000 if number else "k" * 19_999 + "k", array("i", [number]))
    assert bytes_of(store) <= store.num_bytes <= 1 << 16
