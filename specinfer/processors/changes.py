"""Changes of single logits in a long row: what bans, biases and penalties come down to.

    v = -inf where the bias is -inf, else v + bias
    v = v / repetition where v > 0, else v * repetition
    v = v - frequency
    v = v - presence

Each step is rounded to float32, so whoever takes them, here or natively (kernels/sampling.py), gets the same
bits. A term that changes nothing is one of UNCHANGED: a bias of -0.0 leaves even the sign of a zero alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNCHANGED: Final = np.array([-0.0, 1.0, 0.0, 0.0], dtype=np.float32)  # bias, repetition, frequency, presence
_BAN: Final = np.array([[-np.inf, 1.0, 0.0, 0.0]], dtype=np.float32)


class RowChanges(NamedTuple):
    """Changes of one row, made in this order; an id may occur more than once."""

    ids: NDArray[np.int64]  # [N]
    terms: NDArray[np.float32]  # [N, 4]: bias, repetition, frequency, presence

    def apply(self, logits_V: NDArray[np.float32]) -> None:
        """Change `logits_V`, [vocab], in place."""
        ids, terms = self
        while len(ids):  # a round changes each id once
            first = np.unique(ids, return_index=True)[1]
            change_each(logits_V, RowChanges(ids[first], terms[first]))
            ids, terms = np.delete(ids, first), np.delete(terms, first, axis=0)


NOTHING: Final = RowChanges(np.zeros(0, dtype=np.int64), np.zeros((0, 4), dtype=np.float32))


class Changes(NamedTuple):
    """Changes of several rows, those of each row behind those of the row before it."""

    ids: NDArray[np.int64]  # [N]
    terms: NDArray[np.float32]  # [N, 4]
    ends: NDArray[np.int64]  # [R]: where those of each row end

    @classmethod
    def of(cls, rows: Sequence[RowChanges]) -> Changes:
        """Those of R >= 1 rows."""
        return cls(
            np.concatenate([row.ids for row in rows]),
            np.concatenate([row.terms for row in rows]),
            np.array(list(accumulate(len(row.ids) for row in rows)), dtype=np.int64),
        )

    def row(self, place: int) -> RowChanges:
        """Those of the row at that place."""
        own = slice(int(self.ends[place - 1]) if place else 0, int(self.ends[place]))
        return RowChanges(self.ids[own], self.terms[own])

    def check(self, vocab: int) -> None:
        """Raise IndexError where one is of a token that rows of `vocab` logits lack, or ends descend."""
        if (np.diff(self.ends, prepend=0) < 0).any():
            raise IndexError(f"got changes of rows that end at {self.ends.tolist()}; allowed: ascending")
        if len(self.ids) and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocab:
            raise IndexError(
                f"got changes of tokens {self.ids.min()} .. {self.ids.max()} in rows of {vocab} logits"
            )


def bans(ids: Sequence[int] | NDArray[np.int64]) -> RowChanges:
    """What makes these tokens impossible."""
    return RowChanges(np.array(ids, dtype=np.int64), _BAN.repeat(len(ids), axis=0))


def biases(added: Mapping[int, float]) -> RowChanges:
    """What adds to the logits of these tokens."""
    terms = np.tile(UNCHANGED, (len(added), 1))
    terms[:, 0] = list(added.values())
    return RowChanges(np.fromiter(added, np.int64, len(added)), terms)


def joined(parts: Sequence[RowChanges]) -> RowChanges:
    """The changes of one row, one part behind the other."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    return RowChanges(
        np.concatenate([part.ids for part in parts]), np.concatenate([part.terms for part in parts])
    )


def change_each(logits_V: NDArray[np.float32], changes: RowChanges) -> None:
    """Change `logits_V`, [vocab], in place, where no two changes of an id differ."""
    ids, terms = changes
    bias, repetition, frequency, presence = terms.T
    with np.errstate(invalid="ignore", over="ignore"):  # infinite and huge logits are the model's affair
        biased = logits_V[ids]
        biased += bias
        np.copyto(biased, bias, where=bias == -np.inf)
        logits = biased * repetition
        np.divide(biased, repetition, out=logits, where=biased > 0)
        logits -= frequency
        logits -= presence
    logits_V[ids] = logits
