"""Logits to a law: temperature, then top-k, top-p, min-p; the same for target and speculators.

Each filter works on the law the one before it left. Most likely first, the ids that remain are always a
prefix, so a filter is a length, and no filter sorts the vocabulary:

    top_k   the k most likely; among equal logits at the end, the lowest ids
    top_p   the shortest prefix with probability >= top_p, at least one; ties likewise
    min_p   all with p >= min_p * max p

A logit of -inf is a banned token (min_tokens, masks): probability zero.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import LogitsError
from specinfer.sampling_params import SamplingParams
from specinfer.verify.law import Law
from specinfer.verify.row_scan import MASS_ERROR, NUMPY_ROW, RowScan

_LOWEST: Final = float(np.nextafter(-np.finfo(np.float32).max, np.float32(0)))
_FIRST_POOL: Final = 64  # top_p looks at this many likely ids, then at eight times as many, ...


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
