"""Texts by cache key, bounded together; each letter is a token."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.answer_store import AnswerStore
from tests.oracles.lookup_trees import occurrences


def letters(text: str) -> array[int]:
    return array("i", [ord(c) for c in text])


def after(store: AnswerStore, key: str | None, tail: str) -> list[str]:
    """Return the continuations of `tail` in the texts of a key."""
    index = store.of(key)
    if index is None:
        return []
    found = occurrences(index.texts(), [*letters(tail)], 1, 100)
    return ["".join(map(chr, text[stop:])) for stop, text, _ in found]


def test_a_key_sees_its_own_texts_only(library: Library) -> None:
    store = AnswerStore(1 << 16, library)
    store.add("mine", letters("ab1"))
    store.add("yours", letters("ab2"))
    store.add(None, letters("ab3"))
    assert after(store, "mine", "ab") == ["1"]
    assert after(store, "yours", "ab") == ["2"]
    assert after(store, None, "ab") == ["3"]
    assert after(store, "None", "ab") == []


def test_without_memory_nothing_is_kept(library: Library) -> None:
    for memory in (0, 1, 1000):
        store = AnswerStore(memory, library)
        store.add(None, letters("abc"))
        assert store.of(None) is None


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
