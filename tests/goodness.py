"""P-values of goodness-of-fit tests, as in scipy.stats, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

Array = np.ndarray[Any, np.dtype[Any]]


def chi_square(seen: Array, expected: Array | None = None) -> float:
    """Return Pearson's p-value of counts; by default all are equally likely."""
    seen = np.asarray(seen, dtype=float)
    wanted = np.full(len(seen), seen.mean()) if expected is None else np.asarray(expected, dtype=float)
    assert np.isclose(seen.sum(), wanted.sum()), "all that was seen was expected somewhere"
    return float(scipy.special.chdtrc(len(seen) - 1, ((seen - wanted) ** 2 / wanted).sum()))


def kolmogorov(values: Array, cdf: Callable[[Array], Array]) -> float:
    """Return the Kolmogorov-Smirnov p-value of thousands of values."""
    below, n = cdf(np.sort(values)), len(values)
    steps = np.arange(n + 1) / n
    furthest = max((steps[1:] - below).max(), (below - steps[:-1]).max())
    return float(scipy.special.kolmogorov(furthest * n**0.5))
