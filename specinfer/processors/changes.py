"""Sparse changes of a row of logits: bans, biases, penalties and bad words.

    v = -inf where the bias is -inf, else v + bias
    v = v / repetition where v > 0, else v * repetition
    v = v - frequency
    v = v - presence

Each step is rounded to float32, so this code and the native code (kernels/sampling.py) give the same bits. A
term without effect has its value in UNCHANGED: a bias of -0.0 preserves even the sign of a zero.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams

UNCHANGED: Final = np.array([-0.0, 1.0, 0.0, 0.0], dtype=np.float32)  # bias, repetition, frequency, presence
_BAN: Final = np.array([[-np.inf, 1.0, 0.0, 0.0]], dtype=np.float32)


class RowChanges(NamedTuple):
    """Changes of one row, applied in this order; an id may occur more than once."""

    ids: NDArray[np.int64]  # [N]
    terms: NDArray[np.float32]  # [N, 4]: bias, repetition, frequency, presence

    def apply(self, logits_V: NDArray[np.float32]) -> None:
        """Change `logits_V`, [vocab], in place."""
        ids, terms = self
        while len(ids):  # each round changes an id once
            first = np.unique(ids, return_index=True)[1]
            change_each(logits_V, RowChanges(ids[first], terms[first]))
            ids, terms = np.delete(ids, first), np.delete(terms, first, axis=0)


NOTHING: Final = RowChanges(np.zeros(0, dtype=np.int64), np.zeros((0, 4), dtype=np.float32))


class Changes(NamedTuple):
    """Changes of several rows, concatenated in row order."""

    ids: NDArray[np.int64]  # [N]
    terms: NDArray[np.float32]  # [N, 4]
    ends: NDArray[np.int64]  # [R]: the end of each row's changes

    @classmethod
    def of(cls, rows: Sequence[RowChanges]) -> Self:
        """Concatenate the changes of R >= 1 rows."""
        return cls(
            np.concatenate([row.ids for row in rows]),
            np.concatenate([row.terms for row in rows]),
            np.array(list(accumulate(len(row.ids) for row in rows)), dtype=np.int64),
        )

    def row(self, place: int) -> RowChanges:
        """Return the changes of one row, by its index."""
        own = slice(int(self.ends[place - 1]) if place else 0, int(self.ends[place]))
        return RowChanges(self.ids[own], self.terms[own])

    def check(self, vocab: int) -> None:
        """Raise IndexError if a token id is outside [0, vocab) or `ends` descend."""
        if (np.diff(self.ends, prepend=0) < 0).any():
            raise IndexError(f"got row ends {self.ends.tolist()}; allowed: ascending")
        if len(self.ids) and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocab:
            raise IndexError(
                f"got changes of token ids {self.ids.min()} .. {self.ids.max()} in rows of {vocab} logits"
            )


def bans(ids: Sequence[int] | NDArray[np.int64]) -> RowChanges:
    """Make these tokens impossible."""
    return RowChanges(np.array(ids, dtype=np.int64), _BAN.repeat(len(ids), axis=0))


def biases(added: Mapping[int, float]) -> RowChanges:
    """Add to the logits of these tokens."""
    terms = np.tile(UNCHANGED, (len(added), 1))
    terms[:, 0] = list(added.values())
    return RowChanges(np.fromiter(added, np.int64, len(added)), terms)


def joined(parts: Sequence[RowChanges]) -> RowChanges:
    """Concatenate changes of one row."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    return RowChanges(
        np.concatenate([part.ids for part in parts]), np.concatenate([part.terms for part in parts])
    )


def change_each(logits_V: NDArray[np.float32], changes: RowChanges) -> None:
    """Change `logits_V`, [vocab], in place; no two changes of an id may differ."""
    ids, terms = changes
    bias, repetition, frequency, presence = terms.T
    # infinite and huge logits come from the model and are kept
    with np.errstate(invalid="ignore", over="ignore"):
        biased = logits_V[ids]
        biased += bias
        np.copyto(biased, bias, where=bias == -np.inf)
        logits = biased * repetition
        np.divide(biased, repetition, out=logits, where=biased > 0)
        logits -= frequency
        logits -= presence
    logits_V[ids] = logits


class Penalties:
    """Repetition penalty over prompt and output; frequency and presence penalty over the output.

    The work is proportional to the number of distinct ids in the text, not to the vocabulary.
    """

    def __init__(
        self, prompt: Sequence[int], *, repetition: float, frequency: float, presence: float
    ) -> None:
        self._repetition = np.float32(repetition)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        # A token that occurs only in the prompt has count 0: only repetition_penalty applies to it.
        self._seen = _Occurrences(dict.fromkeys(prompt) if repetition != 1 else ())
        self._terms = self._terms_up_to(16)

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int]) -> Self | None:
        """Return the penalties of `params`, or None if it has none."""
        repetition, frequency = params.repetition_penalty, params.frequency_penalty
        if repetition == 1 and frequency == 0 and params.presence_penalty == 0:
            return None
        return cls(prompt, repetition=repetition, frequency=frequency, presence=params.presence_penalty)

    def changes(self, path: Sequence[int]) -> RowChanges:
        """Return the changes of the row after the output and then `path`; each id occurs once."""
        ids, counts = self._seen.with_path(path)
        while len(self._terms) <= self._seen.max_count + len(path):
            self._terms = self._terms_up_to(2 * len(self._terms))
        return RowChanges(ids, self._terms.take(counts, axis=0))

    def commit(self, tokens: Sequence[int]) -> None:
        """Append output tokens, in order."""
        self._seen.add(tokens)

    def _terms_up_to(self, count: int) -> NDArray[np.float32]:
        """Return the terms of tokens that occurred 0, 1, ... times, [count, 4]."""
        counts = np.arange(count, dtype=np.float32)
        terms = np.tile(UNCHANGED, (count, 1))
        terms[:, 1] = self._repetition
        terms[:, 2] = self._frequency * counts
        terms[:, 3] = self._presence * (counts > 0)
        return terms


class _Occurrences:
    """Number of occurrences of each token, as growing arrays."""

    def __init__(self, tokens: Iterable[int]) -> None:
        """Start with distinct tokens, each with count 0."""
        self._index = {token: index for index, token in enumerate(tokens)}
        self._ids = np.fromiter(self._index, np.int64, len(self._index))
        self._counts = np.zeros(len(self._index), dtype=np.int64)
        self.max_count = 0  # largest count of a token

    def add(self, tokens: Sequence[int]) -> None:
        """Increment the counts of tokens."""
        for token in tokens:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                spare = np.zeros(max(64, index), dtype=np.int64)
                self._ids = np.concatenate([self._ids, spare])
                self._counts = np.concatenate([self._counts, spare])
            self._ids[index] = token
            self._counts[index] += 1
            self.max_count = max(self.max_count, int(self._counts[index]))

    def with_path(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the distinct ids of the counted tokens and `path`, [n], and their counts, [n]."""
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


class BadWords:
    """Bans the last token of each sequence after the tokens before it."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        # all tokens of a sequence but the last -> banned last tokens
        self._bans: dict[tuple[int, ...], list[int]] = {}
        for *start, last in dict.fromkeys(map(tuple, words)):
            self._bans.setdefault(tuple(start), []).append(last)
        self._lengths = sorted({len(start) for start in self._bans})
        self._tail: tuple[int, ...] = ()  # the last output tokens, as many as the longest key of _bans

    def completions(self, path: Sequence[int]) -> list[int]:
        """Return the token ids banned after the output and `path`; one dictionary lookup per length."""
        tail = (*self._tail, *path)
        lengths = [n for n in self._lengths if n <= len(tail)]
        return [token for n in lengths for token in self._bans.get(tail[len(tail) - n :], ())]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append output tokens, in order."""
        tail = (*self._tail, *tokens)
        self._tail = tail[max(0, len(tail) - max(self._lengths, default=0)) :]


def tokenize_bad_words(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return each text's token ids at the start of an answer and after a space.

    Raises RequestError if the tokenizer has no tokens for a text.
    """
    found: list[list[int]] = []
    for word in words:
        bare = list(encode(word.lstrip()))
        if not bare:
            raise RequestError(f"bad_words has {word!r}, for which the model has no token; remove it")
        spaced = list(encode(" " + word.lstrip()))
        found.extend([bare] if spaced == bare else [bare, spaced])
    return found
