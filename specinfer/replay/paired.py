"""How much quicker one way to play texts is than another, with an interval.

Both play the same texts, so texts are paired: which of them a workload happens to have makes both slow or
quick alike. The interval says what other texts of the same kind would show (a bootstrap over texts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_RESAMPLES: Final = 4000
_LEVEL: Final = (2.5, 97.5)  # percentiles


@dataclass(frozen=True, slots=True)
class Speedup:
    """A ratio of seconds, and the 95% interval around it."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def speedup(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """How many times as quick `after` is as `before`, of the same texts, whose seconds these are.

    Of one text the interval is the ratio alone. The same seconds give the same interval.
    """
    seconds = np.array([before, after])  # [2, texts]
    ratio = float(seconds[0].sum() / seconds[1].sum())
    texts = seconds.shape[1]
    drawn = np.random.default_rng(0).integers(0, texts, (_RESAMPLES, texts))
    sums = seconds[:, drawn].sum(-1)
    low, high = np.percentile(sums[0] / sums[1], _LEVEL)
    return Speedup(ratio, float(low), float(high))
