"""Logits to a law: temperature, then top-k, top-p, min-p; the same for target and speculators.

Each filter works on the law the one before it left. Most likely first, the ids that remain are always a
prefix, so a filter is a length, and no filter sorts the vocabulary:

    top_k   the k most likely; among equal logits at the end, the lowest ids
    top_p   the shortest prefix with probability >= top_p, at least one; ties likewise
    min_p   all with p >= min_p * max p

A logit of -inf is a banned token (min_tokens, masks): probability zero.

A RowScan reads whole rows of logits: the likeliest tokens, the mass of all, who can win the race. Everything
else about a law is arithmetic over a few ids. So these three are what native code is for
(kernels/sampling.py), and they are stated so that any implementation leads to the same choices: the likeliest
tokens are exact, the mass is known to lie within MASS_ERROR, and the racers hold the winner. What is left to
decide is decided in float64, by one code for all. Many rows at once are for verify/scan.py.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import LogitsError
from specinfer.sampling_params import SamplingParams
from specinfer.verify import noise
from specinfer.verify.law import Law, most_likely

# float32 arithmetic: 3 roundings of an exponent of at most 30 in size (smaller weights add up to less than
# 1e-8 of the mass), an exp that is off by 3e-7, and sums of a few weights that are off by as much.
MASS_ERROR: Final = 2.0**-17
# Of temperatures that float32 is for: it has their inverses, and where it has no difference of two logits,
# the weight of the lesser one is nothing.
HOTTEST: Final = 1e29
_EXACT: Final = 256  # up to this many ids, all of them run the race
_FIRST_BLOCK: Final = 1024
_BLOCK: Final = 32768  # ids screened at a time: temporaries stay in the L2 cache
# The screen works in float32; it may keep ids that cannot win and must not drop one that can. Its errors
# (rounded hash, temperature, exp) add up to less than 2**-15 of the bound for every token that can win.
_SCREEN: Final = (1.0 + 2.0**-10) * 2.0**32
_LOWEST: Final = float(np.nextafter(-np.finfo(np.float32).max, np.float32(0)))
_FIRST_POOL: Final = 64  # top_p looks at this many likely ids, then at eight times as many, ...


class RowScan:
    """Reads of a whole row of float32 logits, [vocab], which is never mutated: a few passes of NumPy each."""

    __slots__ = ()

    def most_likely(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
        """The ids of the n >= 1 largest logits, largest first, ties lowest id first; never one of -inf."""
        return most_likely(logits, n)

    def mass(self, logits: NDArray[np.float32], highest: float, temperature: float) -> float:
        """The sum of exp((logit - highest) / temperature), up to MASS_ERROR of it."""
        if temperature > HOTTEST:
            return float(np.exp((logits.astype(np.float64) - highest) / temperature).sum())
        scaled = logits - np.float32(highest)
        scaled *= np.float32(1.0 / temperature)
        return float(np.exp(scaled, out=scaled).sum(dtype=np.float64))

    def racers(self, law: Law, key: int) -> NDArray[np.int64]:
        """Some entries of the law's support, ascending, the winner of the race under `key` among them.

        It takes logarithms only of ids that can still win: v <= E, so E / w < best implies v < w * best,
        and the upper half of the hash alone settles that for nearly every id.
        """
        size = law.logits.shape[0]
        if size <= _EXACT or law.temperature > HOTTEST:
            return np.arange(size)
        # The likeliest token alone, then a small block, then large ones: each bounds what the next looks at.
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
    """log(E / w) of these entries of the support: the lowest wins; w = 1 for the likeliest token."""
    ids = indices if law.ids is None else law.ids[indices]
    race = noise.exponentials_from(noise.high_halves(key, noise.id_hashes(ids)), key, ids)
    return np.asarray(np.log(race) - law.log_weights(indices))


def _screen(law: Law, block: slice, best: float) -> NDArray[np.float32]:
    """The largest upper half with which each entry of the block can still beat the score `best`."""
    weights: NDArray[np.float32] = law.logits[block] - law.logits[law.top]
    weights *= np.float32(1.0 / law.temperature)
    np.exp(weights, out=weights)
    weights *= np.float32(math.exp(best) * _SCREEN)
    return weights


def target_law(logits: NDArray[np.float32], params: SamplingParams, scan: RowScan = NUMPY_ROW) -> Law:
    """The law of the next token under `params`, from one row of logits, [vocab].

    The law may refer to `logits`, which must not change while it is used. Raises LogitsError when a
    logit is NaN or +inf, or all are -inf.
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
    """The law that leaves no choice."""
    return Law(np.zeros(1, dtype=np.float32), np.array([token]), 0, 1.0, vocab)


def _supported(logits: NDArray[np.float32], ids: NDArray[np.int64], temperature: float) -> Law:
    return Law(logits[ids], ids, 0, temperature, logits.shape[0])


class _Row(NamedTuple):
    """What the filters look at."""

    logits: NDArray[np.float32]
    highest: float
    temperature: float
    scan: RowScan

    def weights(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Probabilities of these tokens (None: all), up to a factor; the largest is 1."""
        logits = self.logits if ids is None else self.logits[ids]
        return np.asarray(np.exp((logits.astype(np.float64) - self.highest) / self.temperature))


def _top_p(row: _Row, ids: NDArray[np.int64] | None, top_p: float) -> NDArray[np.int64]:
    if ids is not None:
        cumulated = np.cumsum(row.weights(ids))
        return ids[: _prefix(cumulated, top_p * cumulated[-1])]
    # The mass is known up to an error, so a cut is only known when it is the same at both ends of it.
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
    """The length of the shortest prefix whose weight reaches `wanted`."""
    return int(np.searchsorted(cumulated, wanted, side="left")) + 1


def _min_p(row: _Row, ids: NDArray[np.int64] | None, min_p: float) -> NDArray[np.int64]:
    if ids is None:
        lowest = row.highest + row.temperature * math.log(min_p)
        # One float32 step lower, so that the float64 comparison below decides about every id near it.
        bound = np.nextafter(np.float32(max(lowest, _LOWEST)), np.float32(-np.inf))
        ids = row.scan.most_likely(row.logits, int(np.count_nonzero(row.logits >= bound)))
    return ids[row.weights(ids) >= min_p]
