"""Texts by cache key, bounded together; test_lookup.py looks into them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from specinfer.kernels.library import Library
from specinfer.speculate.lookups.answer_store import AnswerStore

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
