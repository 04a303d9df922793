"""A law: the distribution of the next token after sampling parameters, as logits over a support.

Every filter (top-k, top-p, min-p) only says which ids remain, so a law is always the softmax of
logits / temperature over the ids it supports; nothing is normalised before somebody needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.tree.distribution import Distribution


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """softmax(logits / temperature) over a support; every other token has probability zero.

    A support of one id is a point mass: greedy decoding. A logit of -inf is probability zero.
    """

    logits: NDArray[np.float32]  # [support]
    ids: NDArray[np.int64] | None  # [support], no id twice; None: all of vocab
    top: int  # index into `logits` of the largest
    temperature: float
    vocab: int

    def probabilities(self) -> NDArray[np.float64]:
        """The probability of each supported token, [support], in the order of `ids`."""
        weights = self.log_weights()
        np.exp(weights, out=weights)  # in place: fresh pages cost as much as the arithmetic
        weights /= weights.sum()
        return weights

    def log_weights(self, indices: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """log p plus a constant that makes the largest 0, [support], or for some entries of it only."""
        logits = self.logits if indices is None else self.logits[indices]
        weights = logits.astype(np.float64)
        weights -= float(self.logits[self.top])
        weights /= self.temperature
        return weights

    def id_at(self, index: int) -> int:
        """The token id of an entry of the support."""
        return index if self.ids is None else int(self.ids[index])

    def renamed(self, ids: NDArray[np.int64], vocab: int) -> Law:
        """The same law where the token it calls i is token ids[i] of a vocabulary of `vocab`."""
        return Law(self.logits, ids if self.ids is None else ids[self.ids], self.top, self.temperature, vocab)

    def distribution(self) -> Distribution:
        """The probabilities by ascending token id: what multi-step sampling works on."""
        if self.ids is None:
            return Distribution(self.probabilities(), None, self.vocab)
        order = np.argsort(self.ids, kind="stable")
        return Distribution(self.probabilities()[order], self.ids[order], self.vocab)

    def dense(self) -> NDArray[np.float64]:
        """The probability of every token, [vocab]."""
        return self.distribution().dense()


def most_likely(logits: NDArray[np.floating], n: int) -> NDArray[np.int64]:
    """The ids of the n largest logits, largest first, equal logits lowest id first; never one of -inf.

    One read of the row bounds the n-th largest from below; only ids above the bound are sorted.
    """
    vocab = logits.shape[0]
    if n < vocab:
        candidates = np.flatnonzero((logits >= _bound_of_nth(logits, n)) & (logits > -np.inf))
    else:
        candidates = np.flatnonzero(logits > -np.inf)
    order = np.argsort(-logits[candidates], kind="stable")
    return np.asarray(candidates[order[:n]], dtype=np.int64)


def _bound_of_nth(logits: NDArray[np.floating], n: int) -> float:
    """A value that at least n logits reach, and not many more."""
    groups = logits.shape[0] // 64
    if n > groups:
        return float(np.partition(logits, -n)[-n])
    # n different groups of 64 have a maximum of at least the n-th largest maximum.
    maxima = logits[: 64 * groups].reshape(64, groups).max(axis=0)
    return float(np.partition(maxima, -n)[-n])


def inverse_cdf(weights: NDArray[np.float64], u: float) -> int:
    """The index at which the cumulated weights first exceed u * total, for u in [0, 1).

    Weights need not sum to 1. An index of weight zero is never returned, not even for u = 0 or when
    u * total rounds up to the total.
    """
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))
    if index == len(weights):
        return int(np.flatnonzero(weights)[-1])
    return index
