"""A prediction is cut to its useful length, and indexed once for all requests that share it."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.lookups import alignment
from specinfer.speculate.lookups.alignment import (
    MAX_DELETED,
    PredictionIndex,
    PredictionIndexes,
    relevant_tokens,
)

IDS = st.lists(st.sampled_from([0, 1, 2, (1 << 21) - 1]), max_size=30)


@given(IDS, IDS, st.integers(0, 31), st.integers(1, 4))
def test_the_places_near_another_are_those_of_a_plain_search(
    prediction: list[int], said: list[int], place: int, most: int
) -> None:
    index = PredictionIndex(prediction)
    for n in (3, 1):
        if n > len(said):
            continue
        tail = said[-n:]
        stops = [i for i in range(n, len(prediction) + 1) if prediction[i - n : i] == tail]
        before, behind = [i for i in stops if i < place], [i for i in stops if i >= place]
        assert index.near(tail, place, most) == [*before[-most:], *behind[:most]]


def test_equal_predictions_have_one_index_as_long_as_somebody_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    class Counted(PredictionIndex):
        def __init__(self, token_ids: tuple[int, ...]) -> None:
            made.append(len(token_ids))
            super().__init__(token_ids)

    monkeypatch.setattr(alignment, "PredictionIndex", Counted)
    indexes = PredictionIndexes()
    several = [indexes.indexed(tuple(range(1000))) for _ in range(8)]
    assert several[0] == tuple(range(1000))
    assert made == [1000]
    gone = weakref.ref(several[0].ngrams)
    several.clear()
    gc.collect()
    assert gone() is None
    assert indexes.indexed((1, 2)) == (1, 2)
    assert made == [1000, 2]


def test_a_text_is_encoded_as_far_as_it_can_matter() -> None:
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return list(text.encode())

    assert relevant_tokens("abc", 8, encode) == (97, 98, 99)
    assert relevant_tokens("a" * (2 << 20), 8, encode) == (97,) * (8 + MAX_DELETED)
    assert encoded == [3, 16 * (8 + MAX_DELETED)]
    assert relevant_tokens(tuple(range(5000)), 8, encode) == tuple(range(8 + MAX_DELETED))
    assert relevant_tokens((1, 2), -5, encode) == (1, 2)  # a prompt that leaves no room is refused elsewhere
