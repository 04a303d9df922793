"""Law: the next-token distribution after sampling parameters, as logits over a support.

`target_law` makes it of a row of logits, for the target and for speculators: temperature, then top-k, top-p,
min-p. Each filter works on the result of the one before it. A filter only selects ids, so a law is always the
softmax of logits / temperature over its support, and it is normalized when its probabilities are read. In
order of probability the remaining ids are always a prefix, so a filter is a length, and no filter sorts the
vocabulary:

    top_k   the k most likely; among equal logits at the end, the lowest ids
    top_p   the shortest prefix with probability >= top_p, at least one id; ties likewise
    min_p   all with p >= min_p * max p

A logit of -inf is an excluded token (min_tokens, masks), of probability 0.

A RowScan reads whole rows of logits: the likeliest tokens, the mass of all tokens, and the tokens that can
win the race. All else is arithmetic over a few ids. So native code (kernels/sampling.py) has these three, and
their contracts make every implementation give the same choices: the likeliest tokens are exact, the mass is
within MASS_ERROR, and the racers include the winner. Python then decides in float64. verify/scan.py scans
many rows at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import LogitsError
from specinfer.sampling_params import SamplingParams
from specinfer.tree.distribution import Distribution
from specinfer.verify import noise

# Relative error of a float32 mass. It consists of 3 roundings of an exponent of magnitude at most 30, an exp
# with an error of 3e-7, and sums with about the same error. Smaller weights sum to less than 1e-8 of
# the mass.
MASS_ERROR: Final = 2.0**-17
# Highest temperature for float32: it can represent the inverse, and where it cannot represent the difference
# of two logits, the weight of the lesser one is 0.
HOTTEST: Final = 1e29
_EXACT: Final = 256  # up to this many ids are not screened
_FIRST_BLOCK: Final = 1024
_BLOCK: Final = 32768  # ids screened at a time, so that temporaries fit into the L2 cache
# The screen works in float32. It may keep ids that cannot win and may not drop one that can. Its errors
# (rounded hash, temperature, exp) sum to less than 2**-15 of the bound for every token that can win.
_SCREEN: Final = (1.0 + 2.0**-10) * 2.0**32
_LOWEST: Final = float(np.nextafter(-np.finfo(np.float32).max, np.float32(0)))
_FIRST_POOL: Final = 64  # likeliest ids that top_p reads first; then eight times as many, and so on


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


class RowScan:
    """Scans of one row of float32 logits, [vocab], in a few passes of NumPy; never mutates the row."""

    __slots__ = ()

    def most_likely(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
        """Return the ids of the n >= 1 largest logits, largest first, ties by lowest id, without -inf."""
        return most_likely(logits, n)

    def mass(self, logits: NDArray[np.float32], highest: float, temperature: float) -> float:
        """Return the sum of exp((logit - highest) / temperature), within a relative error of MASS_ERROR."""
        if temperature > HOTTEST:
            return float(np.exp((logits.astype(np.float64) - highest) / temperature).sum())
        scaled = logits - np.float32(highest)
        scaled *= np.float32(1.0 / temperature)
        return float(np.exp(scaled, out=scaled).sum(dtype=np.float64))

    def racers(self, law: Law, key: int) -> NDArray[np.int64]:
        """Return entries of the law's support, ascending, that include the winner of the race under `key`.

        Takes logarithms only of ids that can still win. As v <= E, E / w < best implies v < w * best. The
        upper half of the hash decides this for nearly every id.
        """
        size = law.logits.shape[0]
        if size <= _EXACT or law.temperature > HOTTEST:
            return np.arange(size)
        # The likeliest token, then a small block, then large ones: each result screens the next block.
        winner = law.top
        best = float(race_scores(law, np.array([winner]), key)[0])
        hashes = noise.vocabulary_hashes(law.vocab) if law.ids is None else noise.id_hashes(law.ids)
        start, stop = 0, min(_FIRST_BLOCK, size)
        while start < size:
            block = slice(start, stop)
            highs = noise.high_halves(key, hashes[block])
            indices = np.flatnonzero(highs.astype(np.float32) <= _screen(law, block, best)) + start
            if indices.size:
                scores = race_scores(law, indices, key)
                fastest = int(scores.argmin())
                if scores[fastest] < best:
                    winner, best = int(indices[fastest]), float(scores[fastest])
            start, stop = stop, min(stop + _BLOCK, size)
        return np.array([winner])


NUMPY_ROW: Final = RowScan()


def race_scores(law: Law, indices: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """Return log(E / w) of entries of the support; the lowest wins, and the likeliest token has w = 1."""
    ids = indices if law.ids is None else law.ids[indices]
    race = noise.exponentials_from(noise.high_halves(key, noise.id_hashes(ids)), key, ids)
    return np.asarray(np.log(race) - law.log_weights(indices))


def _screen(law: Law, block: slice, best: float) -> NDArray[np.float32]:
    """Return the largest upper half with which each entry of the block can still beat the score `best`."""
    weights: NDArray[np.float32] = law.logits[block] - law.logits[law.top]
    weights *= np.float32(1.0 / law.temperature)
    np.exp(weights, out=weights)
    weights *= np.float32(math.exp(best) * _SCREEN)
    return weights


def target_law(logits: NDArray[np.float32], params: SamplingParams, scan: RowScan = NUMPY_ROW) -> Law:
    """Return the law of the next token under `params`, from one row of logits, [vocab].

    The law may refer to `logits`, which may not change while it is used. Raises LogitsError if a logit is NaN
    or +inf, or all are -inf.
    """
    vocab = logits.shape[0]
    top = int(logits.argmax())  # the first NaN, if there is one
    highest = float(logits[top])
    if not math.isfinite(highest):
        raise LogitsError(
            f"logit {top} of {vocab} is {highest}; the largest must be finite: check the model's weights, or "
            "use dtype float32"
        )
    if params.greedy:
        return _supported(logits, np.array([top]), 1.0)
    ids: NDArray[np.int64] | None = None
    if 0 < params.top_k < vocab:
        ids = scan.most_likely(logits, params.top_k)
    row = _Row(logits, highest, params.temperature, scan)
    if params.top_p < 1:
        ids = _top_p(row, ids, params.top_p)
    if params.min_p > 0:
        ids = _min_p(row, ids, params.min_p)
    if ids is None:
        return Law(logits, None, top, params.temperature, vocab)
    return _supported(logits, ids, params.temperature)


def point_mass(token: int, vocab: int) -> Law:
    """Return the law that gives `token` probability 1."""
    return Law(np.zeros(1, dtype=np.float32), np.array([token]), 0, 1.0, vocab)


def _supported(logits: NDArray[np.float32], ids: NDArray[np.int64], temperature: float) -> Law:
    return Law(logits[ids], ids, 0, temperature, logits.shape[0])


class _Row(NamedTuple):
    """A row of logits, as the filters read it."""

    logits: NDArray[np.float32]
    highest: float
    temperature: float
    scan: RowScan

    def weights(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return probabilities of these tokens (None: all) up to a factor; the likeliest token has 1."""
        logits = self.logits if ids is None else self.logits[ids]
        return np.asarray(np.exp((logits.astype(np.float64) - self.highest) / self.temperature))


def _top_p(row: _Row, ids: NDArray[np.int64] | None, top_p: float) -> NDArray[np.int64]:
    if ids is not None:
        cumulated = np.cumsum(row.weights(ids))
        return ids[: _prefix(cumulated, top_p * cumulated[-1])]
    # The mass has an error, so a cut is certain only if both ends of the error interval give the same cut.
    wanted = top_p * row.scan.mass(row.logits, row.highest, row.temperature)
    error = MASS_ERROR
    pool = _FIRST_POOL
    while True:
        ids = row.scan.most_likely(row.logits, pool)
        cumulated = np.cumsum(row.weights(ids))
        if cumulated[-1] >= wanted * (1 + error) or pool >= row.logits.shape[0]:
            kept = _prefix(cumulated, wanted * (1 - error))
            if kept == _prefix(cumulated, wanted * (1 + error)):
                return ids[:kept]
            wanted, error = top_p * float(row.weights().sum()), 0.0
        else:
            pool *= 8


def _prefix(cumulated: NDArray[np.float64], wanted: float) -> int:
    """Return the length of the shortest prefix whose weight reaches `wanted`."""
    return int(np.searchsorted(cumulated, wanted, side="left")) + 1


def _min_p(row: _Row, ids: NDArray[np.int64] | None, min_p: float) -> NDArray[np.int64]:
    if ids is None:
        lowest = row.highest + row.temperature * math.log(min_p)
        # One float32 step lower, so that the float64 comparison below decides for every id near the bound.
        bound = np.nextafter(np.float32(max(lowest, _LOWEST)), np.float32(-np.inf))
        ids = row.scan.most_likely(row.logits, int(np.count_nonzero(row.logits >= bound)))
    return ids[row.weights(ids) >= min_p]
