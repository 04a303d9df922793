"""A prediction as requests carry it: as long as it can matter, with the places of its n-grams."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

LENGTHS: Final = (3, 1)  # of the n-grams by which a place is found, longest first
_BITS: Final = 21  # of a token id: three of them are one integer
# What an answer leaves out of its prediction is seldom longer. Without a bound the shortest answer could
# bring megabytes along, of which it follows some tokens.
LEFT_OUT: Final = 1024  # tokens
_CHARACTERS: Final = 16  # of a token; more of a text than that for each token is not tokenized


class PredictionIndex:
    """Where the n-grams of some token ids stand: the positions after each, ascending."""

    __slots__ = ("__weakref__", "_found")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Index them; each id is below 2**21, as those of a vocabulary are."""
        ids = np.array(token_ids, dtype=np.int64)
        self._found: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for n in LENGTHS:
            keys = np.zeros(max(len(ids) - n + 1, 0), dtype=np.int64)
            for i in range(n):
                keys = (keys << _BITS) | ids[i : i + len(keys)]
            order = np.argsort(keys, kind="stable")
            self._found[n] = keys[order], order + n

    def near(self, ngram: Sequence[int], place: int, most: int) -> list[int]:
        """The positions after an n-gram, ascending, at most so many before `place` and so many from it on."""
        keys, stops = self._found[len(ngram)]
        key = 0
        for token in ngram:
            key = (key << _BITS) | token
        first, end = np.searchsorted(keys, key, "left"), np.searchsorted(keys, key, "right")
        middle = first + int(np.searchsorted(stops[first:end], place))
        near: list[int] = stops[max(first, middle - most) : min(end, middle + most)].tolist()
        return near


class IndexedPrediction(tuple[int, ...]):
    """The token ids of a prediction, with their index; equal to the plain tuple."""

    ngrams: PredictionIndex


class PredictionShelf:
    """Indexes predictions, one for all requests with equal ones. May be called by several threads at once."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[int, ...], PredictionIndex] = (
            weakref.WeakValueDictionary()
        )
        self._making = threading.Lock()

    def indexed(self, token_ids: tuple[int, ...]) -> IndexedPrediction:
        """The same with its index, which is kept as long as one of those that share it."""
        made = IndexedPrediction(token_ids)
        with self._making:
            index = self._known.get(token_ids)
            if index is None:
                index = self._known[token_ids] = PredictionIndex(token_ids)
        made.ngrams = index
        return made


def within_reach(
    prediction: str | Sequence[int], room: int, encode: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """The token ids of a prediction as far as they can matter to an answer of at most `room` tokens.

    Of a text no more is encoded than has so many tokens.
    """
    most = max(room, 0) + LEFT_OUT
    token_ids = encode(prediction[: most * _CHARACTERS]) if isinstance(prediction, str) else prediction
    return tuple(token_ids[:most])
