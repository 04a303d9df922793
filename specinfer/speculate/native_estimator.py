"""An estimator in native code: what Estimator says and learns, to the last bit, in a call for all guesses.

What is known lies in one array, a stretch of numbers for each speculator as cpu/estimates.h has them; guesses
go there as bytes. It becomes an Estimator, and one of it, when it is kept or recalled.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_double
from functools import cache
from itertools import chain
from typing import Any, Final, cast

from specinfer.kernels.library import Library
from specinfer.speculate.calibration import PRIOR, Calibration, levels, rate_of_level
from specinfer.speculate.estimator import Estimator, Rival
from specinfer.speculate.features import NAMES
from specinfer.speculate.logistic import Logistic
from specinfer.speculate.priors import prior
from specinfer.tree import Draw

_WEIGHTS: Final = len(NAMES)
_LEAD, _OUTCOMES, _COUNTS = _WEIGHTS, _WEIGHTS + 1, _WEIGHTS + 2  # where they lie in a stretch
_LEVELS: Final = levels()
_PAIRS: Final = 2 * len(_LEVELS)  # of numbers, of the counts of others than first choices, or of these
_NUMBERS: Final = _COUNTS + 2 * _PAIRS  # of a stretch
_UNSEEN: Final = [number for level in _LEVELS for number in (PRIOR * rate_of_level(level), PRIOR)]


class NativeEstimator:
    """An `Estimates` that computes in `library`."""

    def __init__(self, library: Library, *, logistics: bool = True) -> None:
        self._library = library
        self._logistics = logistics
        self._known = array("d")
        self._address = 0  # of it
        self._numbers = _Numbers()
        self._rates = (c_double * 64)()
        self.outcomes = 0  # of all guesses, that it has learnt from

    def node_rates(self, draws: Sequence[Draw], num_nodes: int, temperature: float) -> list[float]:
        """As Estimates says."""
        if not draws:
            return [0.0] * num_nodes
        if len(self._rates) < num_nodes:
            self._rates = (c_double * (2 * num_nodes))()
        told, evidence = self._packed(draws)
        there = self._library.estimate(
            *(told, len(draws), evidence, temperature, self._logistics),
            *(self._address, num_nodes, self._rates),
        )
        if not there:
            raise IndexError(f"guesses of a tree of {num_nodes} nodes name others")
        return self._rates[:num_nodes]

    def learn_path(
        self, below: Sequence[tuple[Sequence[Draw], int | None]], num_nodes: int, temperature: float
    ) -> None:
        """As Estimates says."""
        draws = [draw for some, _ in below for draw in some]
        if not draws:
            return
        self.outcomes += len(draws)
        groups = [len(some) for some, _ in below]
        groups += [-1 if node is None else node for _, node in below]
        told, evidence = self._packed(draws, groups)
        there = self._library.learn(
            *(told, len(draws), evidence, temperature, self._logistics, len(below), num_nodes, self._address)
        )
        if not there:
            raise IndexError(f"guesses of a tree of {num_nodes} nodes name others")

    def to_json(self) -> dict[str, Any]:
        """As Estimator's."""
        return self._twin().to_json()

    def recall(self, told: Mapping[str, Any]) -> None:
        """As Estimator's."""
        twin = Estimator(logistics=self._logistics)
        twin.recall(told)
        self._known, self._numbers, self.outcomes = array("d"), _Numbers(), twin.outcomes
        for name, rival in twin.rivals.items():
            at = _NUMBERS * self._meet(name, 0)
            self._known[at : at + _COUNTS] = array("d", [*rival.logistic.weights, rival.lead, rival.outcomes])
        for name, level, first, accepted, seen in twin.counts.to_json():
            number = self._numbers.get(name)
            at = _NUMBERS * (self._meet(name, 0) if number is None else number)
            at += _COUNTS + first * _PAIRS + 2 * _LEVELS.index(level)
            self._known[at : at + 2] = array("d", [accepted, seen])

    def _packed(self, draws: Sequence[Draw], groups: Sequence[int] = ()) -> tuple[bytes, int]:
        """Draws as the library takes them, and the numbers of evidence that they have; meets who is new."""
        parents, nodes, names, _, _, confidences, seen = zip(*draws, strict=True)
        speculators = [*map(self._numbers.__getitem__, names)]
        if self._numbers.new:
            self._meet_all(draws)
        evidence = [*chain.from_iterable(seen)]
        form = _form(len(draws) + len(evidence), 4 * len(draws) + len(groups))
        whole = *parents, *nodes, *speculators, *map(len, seen), *groups
        try:
            return form(*confidences, *evidence, *whole), len(evidence)
        except (struct.error, OverflowError):  # what a speculator of one's own gave is no number
            return form(*map(_number, [*confidences, *evidence]), *whole), len(evidence)

    def _meet_all(self, draws: Sequence[Draw]) -> None:
        """Begin with the speculators that have a new number: by what their guesses look like."""
        for name in self._numbers.new:
            first = next(draw for draw in draws if draw.speculator == name)
            self._begin(len(first.evidence))
        self._numbers.new.clear()

    def _meet(self, name: str, evidence: int) -> int:
        """Begin with one speculator, which gets the next number."""
        number = self._numbers[name]
        self._numbers.new.clear()
        self._begin(evidence)
        return number

    def _begin(self, evidence: int) -> None:
        self._known.extend([*prior(evidence), 0.0, 0.0, *_UNSEEN, *_UNSEEN])
        self._address = self._known.buffer_info()[0]

    def _twin(self) -> Estimator:
        """What is known as an Estimator."""
        rivals, counts = dict[str, Rival](), Calibration()
        for name, number in self._numbers.items():
            stretch = self._known[_NUMBERS * number : _NUMBERS * (number + 1)].tolist()
            if self._logistics:
                a, b, c, d, e, f, g, h, i = stretch[:_WEIGHTS]
                logistic = Logistic((a, b, c, d, e, f, g, h, i))
                rivals[name] = Rival(logistic, stretch[_LEAD], int(stretch[_OUTCOMES]))
            for first in (False, True):
                start = _COUNTS + first * _PAIRS
                for level, at in zip(_LEVELS, range(start, start + _PAIRS, 2), strict=True):
                    accepted, seen = stretch[at : at + 2]
                    if (accepted, seen) != (PRIOR * rate_of_level(level), PRIOR):
                        counts.put(name, level, first, accepted, seen)
        return Estimator(counts, rivals, self._logistics, self.outcomes)


class _Numbers(dict[str, int]):
    """Speculators by name; one that is looked up and not there gets the next number, and is `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, name: str) -> int:
        self.new.append(name)
        number = self[name] = len(self)
        return number


def _number(value: object) -> float:
    """A value as a number; NaN where it is none, infinite where it is too large for one."""
    try:
        return float(cast(float, value))
    except OverflowError:
        return math.copysign(math.inf, cast(int, value) > 0 or -1)
    except (TypeError, ValueError):
        return math.nan


@cache
def _form(doubles: int, integers: int) -> Any:
    """What packs so many numbers: as many forms as trees have sizes."""
    return struct.Struct(f"={doubles}d{integers}i").pack
