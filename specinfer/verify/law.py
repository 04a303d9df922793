"""Law: the next-token distribution after sampling parameters, as logits over a support.

A filter (top-k, top-p, min-p) only selects ids, so a law is always the softmax of logits / temperature over
its support. It is normalized when its probabilities are read.
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
    top: int  # index of the largest logit
    temperature: float
    vocab: int

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probability of each supported token, [support], in the order of `ids`."""
        weights = self.log_weights()
        np.exp(weights, out=weights)  # in place: new memory pages cost as much time as the arithmetic
        weights /= weights.sum()
        return weights

    def log_weights(self, indices: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return log p plus a constant that makes the largest 0, [support] or [indices]."""
        logits = self.logits if indices is None else self.logits[indices]
        weights = logits.astype(np.float64)
        weights -= float(self.logits[self.top])
        weights /= self.temperature
        return weights

    def id_at(self, index: int) -> int:
        """Return the token id at an index of the support."""
        return index if self.ids is None else int(self.ids[index])

    def renamed(self, ids: NDArray[np.int64], vocab: int) -> Law:
        """Return this law with token i renamed to ids[i], in a vocabulary of `vocab` tokens."""
        return Law(self.logits, ids if self.ids is None else ids[self.ids], self.top, self.temperature, vocab)

    def distribution(self) -> Distribution:
        """Return the probabilities by ascending token id, for multi-step sampling."""
        if self.ids is None:
            return Distribution(self.probabilities(), None, self.vocab)
        order = np.argsort(self.ids, kind="stable")
        return Distribution(self.probabilities()[order], self.ids[order], self.vocab)

    def dense(self) -> NDArray[np.float64]:
        """Return the probability of every token, [vocab]."""
        return self.distribution().dense()


def most_likely(logits: NDArray[np.floating], n: int) -> NDArray[np.int64]:
    """Return the ids of the n largest logits, largest first, ties by lowest id; excludes logits of -inf.

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
    """Return a value that at least n logits reach, and not many more."""
    groups = logits.shape[0] // 64
    if n > groups:
        return float(np.partition(logits, -n)[-n])
    # n different groups of 64 have a maximum of at least the n-th largest maximum.
    maxima = logits[: 64 * groups].reshape(64, groups).max(axis=0)
    return float(np.partition(maxima, -n)[-n])


def inverse_cdf(weights: NDArray[np.float64], u: float) -> int:
    """Return the first index where the cumulative weight exceeds u * total, for u in [0, 1).

    Weights need not sum to 1. An index of weight 0 is never returned, not even for u = 0 or when u * total
    rounds up to the total.
    """
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))
    if index == len(weights):
        return int(np.flatnonzero(weights)[-1])
    return index
