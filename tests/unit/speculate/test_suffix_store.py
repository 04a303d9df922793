"""Texts by cache key, bounded together; each letter is a token."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.suffix_store import SuffixStore


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


def test_a_key_sees_its_own_texts_only() -> None:
    store = SuffixStore(100)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add(None, letters("ab3"))
    assert after(store, "mine", "ab") == ["1"]
    assert after(store, "yours", "ab") == ["2"]
    assert after(store, None, "ab") == ["3"]
    assert after(store, "None", "ab") == []


def test_the_oldest_text_of_any_key_leaves_whole() -> None:
    store = SuffixStore(12)  # three texts of three tokens and a separator
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add("mine", letters("ab3"))
    assert store.num_tokens == 12
    store.add("yours", letters("a"))
    assert after(store, "mine", "ab") == ["3"]
    assert store.num_tokens == 10
    store.add("yours", letters("ab4"))
    assert after(store, "yours", "ab") == ["4"]


def test_a_key_without_texts_is_forgotten() -> None:
    store = SuffixStore(4)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    assert store.of("mine") is None


def test_of_a_text_that_is_too_long_the_end_stays() -> None:
    store = SuffixStore(6)
    store.add(None, letters("abcdefgh"))
    assert after(store, None, "d") == ["efgh"]
    assert after(store, None, "b") == []
    assert store.num_tokens == 6


def test_without_memory_nothing_is_kept() -> None:
    for memory in (0, 1):
        store = SuffixStore(memory)
        store.add(None, letters("abc"))
        store.check_integrity()
        assert store.of(None) is None


def test_an_empty_text_is_not_kept() -> None:
    store = SuffixStore(10)
    store.add(None, letters(""))
    store.check_integrity()
    assert store.num_tokens == 0


ADDED = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.integers(0, 9)), max_size=30)


@given(ADDED, st.integers(0, 30))
def test_what_is_held_are_the_newest_texts_that_fit(added: list[tuple[str | None, int]], memory: int) -> None:
    store = SuffixStore(memory)
    expected: list[tuple[str | None, int]] = []  # key and size of what should be held
    for key, size in added:
        store.add(key, letters("abcdefghi"[:size]))
        store.check_integrity()
        kept = min(size, memory - 1)
        if kept > 0:
            expected.append((key, kept + 1))
            while sum(size for _, size in expected) > memory:
                expected.pop(0)
        assert store.num_tokens == sum(size for _, size in expected)
        for held in ("x", "y", None):
            index = store.of(held)
            sizes = [size for owner, size in expected if owner == held]
            assert (index.num_texts if index else 0) == len(sizes)
            assert (index.num_tokens if index else 0) == sum(sizes)
