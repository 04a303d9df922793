"""What passes take by now: a cost curve, corrected by what passes took.

A curve is measured once, with an empty context, on a machine that had nothing else to do. Contexts grow, the
memory is shared with a neighbour for a minute, and Python takes its part around each pass. So, with the
curve and three more terms,

    seconds of a pass = m x curve(rows) + a x rows x context + b + c x rows

and m, a, b and c follow what passes take, by recursive least squares that forget. Of every five passes of
about one size only the median is learnt from: a pass that was interrupted shows nothing of the others.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.runtime.cost_curve import CostCurve

_LOG = logging.getLogger(__name__)

_GROUP: Final = 5  # passes of about one size, of which the median is learnt from
_MEMORY: Final = 0.98  # of what was learnt, at each new median: the last 50 decide
_NOISE: Final = 0.05  # of a median, relative to itself
_DRIFT: Final = 0.02  # of m from one median to the next: the machine is slower and quicker by the minute
_SURPRISE: Final = 0.25  # relative; a median so far off is of a machine that is slower or quicker now: of m
_CONTRADICTED: Final = (
    20  # medians, if the last one was as far off to the other side: then sizes are at fault
)
_SETTLED: Final = 0.1  # relative
_STUBBORN: Final = 4  # medians in a row beyond what is believed, for which a curve is blamed
_FARTHEST: Final = 8.0  # times; no pass is believed to be so much slower or quicker than was expected
_CONTEXT: Final = 1000.0  # tokens; the unit of a context
_FINE: Final = 0.002  # of a pass of one row; a context that adds less to a row leaves the seconds as they are
# Of m, a, b and c, the last three in units of a pass of one row, and a for 1000 tokens of context:
_FIRST: Final = (1.0, 0.0, 0.0, 0.0)  # before anything was seen
_DOUBT: Final = (0.5, 0.05, 0.1, 0.02)  # standard deviations, as long as nothing was seen
_LEAST: Final = (0.3, 0.0, 0.0, 0.0)
_MOST: Final = (3.0, 3.0, 3.0, 3.0)


class CostModel:
    """The seconds of one model's passes, by its curve and by passes so far; `name` is for the log.

    With `learns=False` it is the curve alone, whatever is to be learnt from: no clock has a say. With
    `group` 1 every pass is learnt from: those that take seconds are few and hardly disturbed.
    """

    def __init__(self, name: str, curve: CostCurve, *, learns: bool = True, group: int = _GROUP) -> None:
        self._name = name
        self._learns = learns
        self._group = group
        self._rows, self._curve = curve.corners()
        self._unit = float(curve.seconds([1])[0])
        self._terms = list(_FIRST)
        self._doubt = _first_doubt()
        self._context = 0.0  # of the step, in its unit
        self._corrected_at = 0.0  # the context for which `_corners` are right
        self._corners = list(self._curve)  # seconds of now where the curve bends
        self._seconds: NDArray[np.float64] | None = None  # the same; made when somebody asks
        self._table: list[float] = []  # seconds of now of passes of 0, 1, ... rows, as far as they were asked
        self._groups: dict[
            int, list[tuple[float, int, float]]
        ] = {}  # by size: seconds over what was expected
        self._last_error = 0.0
        self._shape = 0  # medians for which surprises are of all terms
        self._settled = True
        self._beyond = 0  # medians in a row for which a pass took more or less than is believed
        self._warned = False

    @property
    def factor(self) -> float:
        """How many times as long a pass of one row takes as when the curve was measured."""
        m, _, b, c = self._terms
        return m + b + c

    @property
    def settled(self) -> bool:
        """Whether the last passes took about what was expected."""
        return self._settled

    def begin(self, context: float) -> None:
        """Say of a step how many tokens its rows look back on, on average."""
        self._context = context / _CONTEXT
        if self._terms[1] * abs(self._context - self._corrected_at) > _FINE:
            self._correct()

    def seconds(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of passes of so many rows in this step, in the shape of `rows`; no rows cost nothing."""
        if self._seconds is None:
            self._seconds = np.array(self._corners)
        return np.asarray(np.interp(rows, self._rows, self._seconds))

    def table(self, most: int) -> Sequence[float]:
        """Seconds of passes of 0, 1, ... `most` rows, and maybe of more.

        It is the same table until something is learnt, or contexts have grown by much.
        """
        if len(self._table) <= most:
            self._table = self.seconds(np.arange(max(most + 1, 2 * len(self._table)))).tolist()
        return self._table

    def expected(self, rows: int) -> float:
        """Seconds of one pass of at least one row in this step; `seconds` of few is slow."""
        return self._between(self._corners, rows)

    def slowness(self, rows: int) -> float:
        """How many times as long such a pass takes in this step as when the curve was measured."""
        return self.expected(rows) / self._between(self._curve, rows)

    def expected_by(self, curve: CostCurve, rows: int) -> float:
        """Those of a pass whose curve is another, with what was learnt by this one."""
        m, a, b, c = self._terms
        return m * curve.expected(rows) + ((a * self._context + c) * rows + b) * self._unit

    def follow(self, curve: CostCurve) -> None:
        """Passes have this curve from now on; what was learnt is true of them as well."""
        self._rows, self._curve = curve.corners()
        self._correct()

    def learn(self, rows: int, seconds: float) -> None:
        """Learn from a pass of this step; what cannot be the seconds of a pass is ignored."""
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
            if abs(error) > _NOISE / 2:  # the rest is chance
                self._update(error, rows, context)
            self._last_error = error

    def fade(self, kept: float) -> None:
        """Trust what was learnt that much, and the curve for the rest: the passes were long ago."""
        self._terms = [first + kept * (term - first) for term, first in zip(self._terms, _FIRST, strict=True)]
        self._correct()

    def _between(self, corners: Sequence[float], rows: int) -> float:
        right = bisect_right(self._rows, rows, hi=len(self._rows) - 1)
        left, before = corners[right - 1], self._rows[right - 1]
        return left + (corners[right] - left) * (rows - before) / (self._rows[right] - before)

    def _update(self, error: float, rows: int, context: float) -> None:
        """One step of recursive least squares, in relative errors; a term at its bound goes no farther.

        In plain floats: numpy is slower with matrices this small.
        """
        parts = [self._between(self._curve, rows) / self._unit, rows * context, 1.0, float(rows)]
        expected = sum(map(mul, parts, self._terms))
        bounds = _MOST if error > 0 else _LEAST
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
            self._doubt[0][0] += _DOUBT[0] ** 2
        spread = [sum(map(mul, row, parts)) for row in self._doubt]
        scale = 1 / (sum(map(mul, parts, spread)) + _NOISE**2)
        self._terms = [
            min(most, max(least, term + error * scale * wide)) if part else term
            for term, wide, part, least, most in zip(self._terms, spread, parts, _LEAST, _MOST, strict=True)
        ]
        doubt = [
            [(old - scale * wide * other) / _MEMORY for old, other in zip(row, spread, strict=True)]
            for row, wide in zip(self._doubt, spread, strict=True)
        ]
        doubt[0][0] += _DRIFT**2
        # What no pass shows is not forgotten: no doubt grows beyond the first.
        too_wide = max(doubt[i][i] / _DOUBT[i] ** 2 for i in range(len(_DOUBT)))
        self._doubt = [[x / too_wide for x in row] for row in doubt] if too_wide > 1 else doubt
        self._correct()
        self._warn()

    def _correct(self) -> None:
        """Make the seconds at the curve's corners those of now."""
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

    def _warn(self) -> None:
        self._beyond = self._beyond + 1 if self._terms[0] in (_LEAST[0], _MOST[0]) else 0
        if not self._warned and self._beyond == _STUBBORN:
            self._warned = True
            _LOG.warning(
                "passes of %s take more than %.1f or less than %.1f times what their cost curve says; trees "
                "are sized by what can be corrected (a curve of another machine? remove the cache's curves)",
                self._name,
                _MOST[0],
                _LEAST[0],
            )


def _first_doubt() -> list[list[float]]:
    """The covariance of the terms before anything was seen."""
    size = len(_DOUBT)
    return [[_DOUBT[i] ** 2 if i == j else 0.0 for j in range(size)] for i in range(size)]
