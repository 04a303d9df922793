"""What a logistic of a speculator's guesses starts with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from specinfer.speculate.policy.features import Features

# Weights of features, in the order of features.NAMES, by how many numbers a speculator's evidence has.
_BY_EVIDENCE: Final[Mapping[int, Features]] = {
    1: (-1.4, 2.4, 0.0, 0.0, 0.0, 0.5, -1.3, -3.0, 0.0),
    2: (0.4, 3.0, 0.9, 0.1, -1.4, 0.0, -0.3, 0.0, 0.0),
    3: (-1.4, 2.0, 1.5, -0.5, -0.2, 2.1, -0.1, -3.0, 0.0),
}
_BELIEVED: Final = (0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # its confidence


def prior(evidence: int) -> Features:
    """The weights for guesses with so many numbers of evidence."""
    return _BY_EVIDENCE.get(evidence, _BELIEVED)
