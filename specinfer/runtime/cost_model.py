"""CostModel: present seconds of passes, from a cost curve corrected by measured passes.

A curve is measured once, with an empty context, on an idle machine. Later contexts grow, other processes use
the memory bandwidth, and Python adds time to each pass. So the model has the curve and three more terms,

    seconds of a pass = m x curve(rows) + a x rows x context + b + c x rows

Recursive least squares with forgetting fits m, a, b and c to the measurements. Only the median of every five
passes of similar size is used, as an interrupted pass is no sample of the others.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.runtime.cost_curve import CostCurve

_GROUP: Final = 5  # passes of about one size whose median is used
_MEMORY: Final = 0.98  # forgetting factor per median: about the last 50 count
_NOISE: Final = 0.05  # standard deviation of a median, relative to it
_DRIFT: Final = 0.02  # standard deviation of the change of m between medians
# Relative error above which a median is attributed to m: the machine's speed has changed.
_SURPRISE: Final = 0.25
# Medians during which all terms are corrected, after two such errors of opposite sign.
_CONTRADICTED: Final = 20
_SETTLED: Final = 0.1  # relative error
_FARTHEST: Final = 8.0  # largest accepted ratio of measured and expected time
_CONTEXT: Final = 1000.0  # tokens, the unit of a context
_FINE: Final = 0.002  # relative to a one-row pass; smaller changes by the context are ignored
# m, a, b and c; the last three in units of one row's pass, and a per 1000 tokens of context:
_FIRST: Final = (1.0, 0.0, 0.0, 0.0)  # initial values
_DEVIATIONS: Final = (0.5, 0.05, 0.1, 0.02)  # initial standard deviations
_MIN: Final = (0.3, 0.0, 0.0, 0.0)
_MAX: Final = (3.0, 3.0, 3.0, 3.0)


class CostModel:
    """Seconds of one model's passes, from its curve and measured passes.

    With `learns=False` it is the curve alone, independent of any clock. With `group` 1 every pass is used,
    for passes that take seconds, which are few and hardly disturbed.
    """

    def __init__(self, curve: CostCurve, *, learns: bool = True, group: int = _GROUP) -> None:
        self._learns = learns
        self._group = group
        self._rows, self._curve = curve.corners()
        self._unit = float(curve.seconds([1])[0])
        self._terms = list(_FIRST)
        self._covariance: list[list[float]] = np.diag(np.square(_DEVIATIONS)).tolist()
        self._context = 0.0  # mean context of the step's rows, in its unit
        self._corrected_at = 0.0  # the context for which `_corners` hold
        self._corners = list(self._curve)  # present seconds at the curve's corners
        self._seconds: NDArray[np.float64] | None = None  # the same as an array, made on demand
        self._table: list[float] = []  # present seconds of passes of 0, 1, ... rows, made on demand
        # By size: measured over expected seconds.
        self._groups: dict[int, list[tuple[float, int, float]]] = {}
        self._last_error = 0.0
        self._shape = 0  # remaining medians during which all terms are corrected
        self._settled = True

    @property
    def factor(self) -> float:
        """Time of a pass of one row relative to the curve's measurement."""
        m, _, b, c = self._terms
        return m + b + c

    @property
    def settled(self) -> bool:
        """True if the last passes took about the expected time."""
        return self._settled

    def begin(self, context: float) -> None:
        """Start a step whose rows have on average `context` tokens of context."""
        self._context = context / _CONTEXT
        if self._terms[1] * abs(self._context - self._corrected_at) > _FINE:
            self._correct()

    def seconds(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of passes of `rows` rows in this step, in the shape of `rows`; 0 for no rows."""
        if self._seconds is None:
            self._seconds = np.array(self._corners)
        return np.asarray(np.interp(rows, self._rows, self._seconds))

    def table(self, rows: int) -> Sequence[float]:
        """Return the seconds of passes of 0, 1, ... `rows` rows, and possibly more.

        The table changes only when something is learned or contexts have grown much.
        """
        if len(self._table) <= rows:
            self._table = self.seconds(np.arange(max(rows + 1, 2 * len(self._table)))).tolist()
        return self._table

    def expected(self, rows: int) -> float:
        """Return the seconds of one pass of at least one row in this step; faster than `seconds`."""
        return self._between(self._corners, rows)

    def slowness(self, rows: int) -> float:
        """Return the time of such a pass in this step relative to the curve's measurement."""
        return self.expected(rows) / self._between(self._curve, rows)

    def expected_by(self, curve: CostCurve, rows: int) -> float:
        """Return the seconds of a pass with another curve and this model's learned terms."""
        m, a, b, c = self._terms
        return m * curve.expected(rows) + ((a * self._context + c) * rows + b) * self._unit

    def follow(self, curve: CostCurve) -> None:
        """Replace the curve and keep the learned terms."""
        self._rows, self._curve = curve.corners()
        self._correct()

    def learn(self, rows: int, seconds: float) -> None:
        """Learn from a pass of this step; ignores impossible values."""
        if not self._learns or rows < 1 or not 0 < seconds < math.inf:
            return
        group = self._groups.setdefault(rows.bit_length(), [])
        group.append((seconds / self.expected(rows), rows, self._context))
        if len(group) == self._group:
            group.sort()
            ratio, rows, context = group[self._group // 2]
            group.clear()
            self._settled = 1 / (1 + _SETTLED) < ratio < 1 + _SETTLED
            error = min(_FARTHEST, max(1 / _FARTHEST, ratio)) - 1
            if abs(error) > _NOISE / 2:  # smaller errors are noise
                self._update(error, rows, context)
            self._last_error = error

    def fade(self, kept: float) -> None:
        """Weigh the learned terms by `kept` and the curve by the rest, as the last passes were long ago."""
        self._terms = [first + kept * (term - first) for term, first in zip(self._terms, _FIRST, strict=True)]
        self._correct()

    def _between(self, corners: Sequence[float], rows: int) -> float:
        right = bisect_right(self._rows, rows, hi=len(self._rows) - 1)
        left, before = corners[right - 1], self._rows[right - 1]
        return left + (corners[right] - left) * (rows - before) / (self._rows[right] - before)

    def _update(self, error: float, rows: int, context: float) -> None:
        """Do one step of recursive least squares in relative errors, with bounded terms.

        It uses Python floats, which are faster than NumPy for matrices this small.
        """
        parts = [self._between(self._curve, rows) / self._unit, rows * context, 1.0, float(rows)]
        expected = sum(map(mul, parts, self._terms))
        bounds = _MAX if error > 0 else _MIN
        parts = [
            0.0 if term == bound else part / expected
            for part, term, bound in zip(parts, self._terms, bounds, strict=True)
        ]
        surprised = abs(error) > _SURPRISE
        if surprised and abs(self._last_error) > _SURPRISE and self._last_error * error < 0:
            self._shape = _CONTRADICTED
        self._shape -= 1
        if surprised and self._shape < 0 and parts[0]:
            parts[1:] = [0.0, 0.0, 0.0]
            self._covariance[0][0] += _DEVIATIONS[0] ** 2
        spread = [sum(map(mul, row, parts)) for row in self._covariance]
        scale = 1 / (sum(map(mul, parts, spread)) + _NOISE**2)
        self._terms = [
            min(highest, max(lowest, term + error * scale * wide)) if part else term
            for term, wide, part, lowest, highest in zip(self._terms, spread, parts, _MIN, _MAX, strict=True)
        ]
        covariance = [
            [(old - scale * wide * other) / _MEMORY for old, other in zip(row, spread, strict=True)]
            for row, wide in zip(self._covariance, spread, strict=True)
        ]
        covariance[0][0] += _DRIFT**2
        # A term that passes do not determine is not forgotten: no variance exceeds its initial value.
        too_wide = max(covariance[i][i] / _DEVIATIONS[i] ** 2 for i in range(len(_DEVIATIONS)))
        self._covariance = [[x / too_wide for x in row] for row in covariance] if too_wide > 1 else covariance
        self._correct()

    def _correct(self) -> None:
        """Update the present seconds at the curve's corners."""
        m, a, b, c = self._terms
        slope = (a * self._context + c) * self._unit
        more = b * self._unit
        self._corners = [
            m * at + slope * rows + more for rows, at in zip(self._rows, self._curve, strict=True)
        ]
        self._corners[0] = 0.0  # no rows
        self._seconds = None
        self._table = []
        self._corrected_at = self._context
