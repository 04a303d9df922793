"""Penalties on tokens the text has already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.processors.changes import UNCHANGED, RowChanges
from specinfer.sampling_params import SamplingParams


class Penalties:
    """repetition_penalty over prompt and output, frequency_penalty and presence_penalty over the output.

    Works on the ids that occurred, never on the whole vocabulary.
    """

    def __init__(
        self, prompt: Sequence[int], *, repetition: float, frequency: float, presence: float
    ) -> None:
        self._repetition = np.float32(repetition)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        # A token of the prompt alone occurs zero times: repetition_penalty is the one that sees it.
        self._seen = _Occurrences(dict.fromkeys(prompt) if repetition != 1 else ())
        self._terms = self._terms_up_to(16)

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int]) -> Penalties | None:
        """The penalties `params` asks for; None when it asks for none."""
        repetition, frequency = params.repetition_penalty, params.frequency_penalty
        if repetition == 1 and frequency == 0 and params.presence_penalty == 0:
            return None
        return cls(prompt, repetition=repetition, frequency=frequency, presence=params.presence_penalty)

    def changes(self, path: Sequence[int]) -> RowChanges:
        """The changes of a row as after the output so far and then the token ids `path`, each id once."""
        ids, counts = self._seen.with_path(path)
        while len(self._terms) <= self._seen.most + len(path):
            self._terms = self._terms_up_to(2 * len(self._terms))
        return RowChanges(ids, self._terms.take(counts, axis=0))

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in output tokens, in order."""
        self._seen.add(tokens)

    def _terms_up_to(self, count: int) -> NDArray[np.float32]:
        """The terms of tokens that occurred 0, 1, ... times, [count, 4]."""
        counts = np.arange(count, dtype=np.float32)
        terms = np.tile(UNCHANGED, (count, 1))
        terms[:, 1] = self._repetition
        terms[:, 2] = self._frequency * counts
        terms[:, 3] = self._presence * (counts > 0)
        return terms


class _Occurrences:
    """How often each token occurred, as arrays that grow."""

    def __init__(self, tokens: Iterable[int]) -> None:
        """Begin with distinct tokens that occurred zero times."""
        self._index = {token: index for index, token in enumerate(tokens)}
        self._ids = np.fromiter(self._index, np.int64, len(self._index))
        self._counts = np.zeros(len(self._index), dtype=np.int64)
        self.most = 0  # that a token occurred

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens that occurred."""
        for token in tokens:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                spare = np.zeros(max(64, index), dtype=np.int64)
                self._ids = np.concatenate([self._ids, spare])
                self._counts = np.concatenate([self._counts, spare])
            self._ids[index] = token
            self._counts[index] += 1
            self.most = max(self.most, int(self._counts[index]))

    def with_path(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The distinct ids, [n], of the tokens counted and those of `path`, and their counts, [n]."""
        size = len(self._index)
        ids, counts = self._ids[:size], self._counts[:size]
        if not path:
            return ids, counts
        counts = np.concatenate([counts, np.zeros(len(path), dtype=np.int64)])
        new: dict[int, int] = {}
        for token in path:
            index = self._index.get(token)
            counts[new.setdefault(token, size + len(new)) if index is None else index] += 1
        ids = np.concatenate([ids, np.fromiter(new, np.int64, len(new))])
        return ids, counts[: len(ids)]
