"""What is known of how likely guesses are, in native memory: what an Estimator knows, to the last bit.

It lies in one array, a stretch of numbers for each speculator as cpu/estimates.h has them. It becomes an
Estimator, and one of it, when it is kept or recalled.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from specinfer.speculate.policy.calibration import PRIOR, Calibration, levels, rate_of_level
from specinfer.speculate.policy.estimator import Estimator, Rival
from specinfer.speculate.policy.features import NAMES
from specinfer.speculate.policy.logistic import Logistic
from specinfer.speculate.policy.priors import prior
from specinfer.tree.draw import Run

_WEIGHTS: Final = len(NAMES)
_LEAD, _OUTCOMES, _COUNTS = _WEIGHTS, _WEIGHTS + 1, _WEIGHTS + 2  # where they lie in a stretch
_LEVELS: Final = levels()
_PAIRS: Final = 2 * len(_LEVELS)  # of numbers, of the counts of others than first choices, or of these
_NUMBERS: Final = _COUNTS + 2 * _PAIRS  # of a stretch
_UNSEEN: Final = [number for level in _LEVELS for number in (PRIOR * rate_of_level(level), PRIOR)]


class NativeKnowledge:
    """What was learnt of speculators, which have numbers here; without `logistics` counts alone."""

    def __init__(self, *, logistics: bool = True) -> None:
        self.logistics = logistics
        self.outcomes = 0  # of all guesses, that were learnt from
        self.version = 0  # another one when somebody is met, and who has which number may be another
        self.address = 0  # of what is known, until then
        self._known = array("d")
        self._numbers = _Numbers()

    @property
    def names(self) -> Sequence[str]:
        """The speculators that were met, by number."""
        return [*self._numbers]

    def numbers(self, runs: Sequence[Run]) -> list[int]:
        """The numbers of those that have made some guesses.

        Who is new is met: what it begins with depends on what its guesses look like.
        """
        found = [self._numbers[run.speculator] for run in runs]
        if self._numbers.new:
            for name in self._numbers.new:
                self._begin(next(run.pieces for run in runs if run.speculator == name))
            self._numbers.new.clear()
        return found

    def to_json(self) -> dict[str, Any]:
        """As Estimator's."""
        return self._twin().to_json()

    def recall(self, told: Mapping[str, Any]) -> None:
        """As Estimator's."""
        twin = Estimator(logistics=self.logistics)
        twin.recall(told)
        self._known, self._numbers, self.outcomes = array("d"), _Numbers(), twin.outcomes
        self.address, self.version = 0, self.version + 1
        for name, rival in twin.rivals.items():
            at = _NUMBERS * self._meet(name, 0)
            self._known[at : at + _COUNTS] = array("d", [*rival.logistic.weights, rival.lead, rival.outcomes])
        for name, level, first, accepted, seen in twin.counts.to_json():
            number = self._numbers.get(name)
            at = _NUMBERS * (self._meet(name, 0) if number is None else number)
            at += _COUNTS + first * _PAIRS + 2 * _LEVELS.index(level)
            self._known[at : at + 2] = array("d", [accepted, seen])

    def _meet(self, name: str, evidence: int) -> int:
        """Begin with one speculator, which gets the next number."""
        number = self._numbers[name]
        self._numbers.new.clear()
        self._begin(evidence)
        return number

    def _begin(self, evidence: int) -> None:
        self._known.extend([*prior(evidence), 0.0, 0.0, *_UNSEEN, *_UNSEEN])
        self.address = self._known.buffer_info()[0]
        self.version += 1

    def _twin(self) -> Estimator:
        """What is known as an Estimator."""
        rivals, counts = dict[str, Rival](), Calibration()
        for name, number in self._numbers.items():
            stretch = self._known[_NUMBERS * number : _NUMBERS * (number + 1)].tolist()
            if self.logistics:
                a, b, c, d, e, f, g, h, i = stretch[:_WEIGHTS]
                logistic = Logistic((a, b, c, d, e, f, g, h, i))
                rivals[name] = Rival(logistic, stretch[_LEAD], int(stretch[_OUTCOMES]))
            for first in (False, True):
                start = _COUNTS + first * _PAIRS
                for level, at in zip(_LEVELS, range(start, start + _PAIRS, 2), strict=True):
                    accepted, seen = stretch[at : at + 2]
                    if (accepted, seen) != (PRIOR * rate_of_level(level), PRIOR):
                        counts.put(name, level, first, accepted, seen)
        return Estimator(counts, rivals, self.logistics, self.outcomes)


class _Numbers(dict[str, int]):
    """Speculators by name; one that is looked up and not there gets the next number, and is `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, name: str) -> int:
        self.new.append(name)
        number = self[name] = len(self)
        return number
