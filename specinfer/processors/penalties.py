"""Penalties on tokens the text has already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
        self._seen = _Occurrences(dict.fromkeys(prompt, 0) if repetition != 1 else {})

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int]) -> Penalties | None:
        """The penalties `params` asks for; None when it asks for none."""
        repetition, frequency = params.repetition_penalty, params.frequency_penalty
        if repetition == 1 and frequency == 0 and params.presence_penalty == 0:
            return None
        return cls(prompt, repetition=repetition, frequency=frequency, presence=params.presence_penalty)

    def apply(self, logits_V: NDArray[np.float32], path: Sequence[int]) -> None:
        """Penalise `logits_V` in place, as after the output so far and then the token ids `path`."""
        ids, counts = self._seen.with_path(path)
        logits = logits_V[ids]
        if self._repetition != 1:
            logits = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits -= self._frequency * counts
        logits -= self._presence * (counts > 0)
        logits_V[ids] = logits

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in output tokens, in order."""
        self._seen.add(tokens)


class _Occurrences:
    """How often each token occurred, as arrays that grow."""

    def __init__(self, counts: dict[int, int]) -> None:
        self._index = {token: index for index, token in enumerate(counts)}
        self._ids = np.fromiter(counts.keys(), np.int64, len(counts))
        self._counts = np.fromiter(counts.values(), np.float32, len(counts))

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens that occurred."""
        for token in tokens:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                spare = max(64, index)
                self._ids = np.concatenate([self._ids, np.zeros(spare, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(spare, dtype=np.float32)])
            self._ids[index] = token
            self._counts[index] += 1

    def with_path(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct ids, [n], of the tokens counted and those of `path`, and their counts, [n]."""
        size = len(self._index)
        ids, counts = self._ids[:size], self._counts[:size]
        if not path:
            return ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token, times in Counter(path).items():
            if (index := self._index.get(token)) is None:
                new[token] = times
            else:
                counts[index] += times
        return (
            np.concatenate([ids, np.fromiter(new.keys(), np.int64, len(new))]),
            np.concatenate([counts, np.fromiter(new.values(), np.float32, len(new))]),
        )
