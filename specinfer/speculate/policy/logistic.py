"""A logistic that learns while it is used: how likely a guess is to become text, given its features.

    probability = 1 / (1 + exp(-(weights . features)))

Each outcome moves the weights a little against the gradient of its log-loss, always by the same measure, so
that it follows the texts. In plain floats, as nine are weighed in the time numpy takes to be called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specinfer.speculate.policy import bounded
from specinfer.speculate.policy.features import NAMES, Features

HEAVIEST: Final = 16.0  # of weights; features are at most 2, so no sum of theirs is too large for exp
UNSURE: Final = 0.002  # nothing is less likely, nor likelier than what this leaves
PACE: Final = 0.05  # of an error that a weight moves by, where its feature is 1


@dataclass(slots=True)
class Logistic:
    """Weights of features, in the order of NAMES."""

    weights: Features

    def probability(self, features: Features) -> float:
        """How likely a guess with these features is, between UNSURE and 1 - UNSURE."""
        a, b, c, d, e, f, g, h, i = self.weights
        x, y, z, u, v, w, s, t, r = features
        likely = 1 / (1 + math.exp(-(a * x + b * y + c * z + d * u + e * v + f * w + g * s + h * t + i * r)))
        return UNSURE if likely < UNSURE else 1 - UNSURE if likely > 1 - UNSURE else likely

    def learn(self, features: Features, likely: float, became: bool) -> None:
        """Learn that a guess with these features, thought to be as `likely`, became text or did not."""
        step = PACE * (became - likely)
        a, b, c, d, e, f, g, h, i = self.weights
        x, y, z, u, v, w, s, t, r = features
        moved = (
            a + step * x,
            b + step * y,
            c + step * z,
            d + step * u,
            e + step * v,
            f + step * w,
            g + step * s,
            h + step * t,
            i + step * r,
        )
        if max(moved) > HEAVIEST or min(moved) < -HEAVIEST:
            a, b, c, d, e, f, g, h, i = [max(-HEAVIEST, min(HEAVIEST, weight)) for weight in moved]
            moved = (a, b, c, d, e, f, g, h, i)
        self.weights = moved

    @classmethod
    def from_named(cls, weights: Mapping[str, object]) -> Logistic:
        """One of these weights by feature; raises ValueError where they cannot be."""
        if weights.keys() != set(NAMES):
            raise ValueError(f"it has weights of {', '.join(weights):.80}, not of {', '.join(NAMES)}")
        a, b, c, d, e, f, g, h, i = [bounded.real(weights[name], -HEAVIEST, HEAVIEST) for name in NAMES]
        return cls((a, b, c, d, e, f, g, h, i))

    def named(self) -> dict[str, float]:
        """The weights by feature."""
        return dict(zip(NAMES, self.weights, strict=True))
