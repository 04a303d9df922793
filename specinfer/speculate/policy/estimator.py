"""How likely guesses are: by what became of others like them, or by a logistic, whichever was right of late.

Counts (calibration.py) know one thing of a guess, its confidence, and are never far off. A logistic knows
more (features.py), and may be wrong: of a speculator it was not fitted to, or whose evidence means something
else. So both say of every outcome how likely they had thought it, and each speculator's guesses are estimated
by the one whose log-loss was lower of late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from specinfer.speculate.policy import bounded
from specinfer.speculate.policy.calibration import Calibration
from specinfer.speculate.policy.features import features_of
from specinfer.speculate.policy.logistic import UNSURE, Logistic
from specinfer.speculate.policy.priors import prior
from specinfer.tree import Draw

MOST_LEAD: Final = 5.0  # nats; so a logistic that went wrong has lost its lead within some outcomes
_MEMORY: Final = 0.998  # what a lead keeps at each outcome: the last 500 decide
_MOST_OUTCOMES: Final = 1 << 53
_MOST_RIVALS: Final = 256


class Lasting(Protocol):
    """What was learnt of guesses, and can be kept."""

    outcomes: int  # of all guesses, that were learnt from

    def to_json(self) -> dict[str, Any]:
        """What was learnt, as JSON values."""
        ...

    def recall(self, told: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave; raises ValueError or KeyError, and then takes nothing."""
        ...


class Estimates(Lasting, Protocol):
    """Whoever says how likely guesses are, and learns from what became of them."""

    def node_rates(self, draws: Sequence[Draw], num_nodes: int, temperature: float) -> list[float]:
        """The probability of every node to become text if its parent does, [num_nodes].

        Of nodes that hold none of these draws it is 0; of several draws of one the likeliest is believed. The
        draws are all there are below their parents, in the order in which they were made; `temperature` is
        the request's.
        """
        ...

    def learn(self, below: Sequence[Draw], accepted: int | None, temperature: float) -> None:
        """Learn what became of all draws below one node of the text.

        Those at node `accepted` became text; None: none did.
        """
        ...


def rates_of_nodes(draws: Sequence[Draw], likely: Sequence[float], num_nodes: int) -> list[float]:
    """The rate of every node [num_nodes]: of the draws it holds, the likeliest's; 0 where it holds none."""
    rates = [0.0] * num_nodes
    for draw, rate in zip(draws, likely, strict=True):
        node = draw.node
        if rate > rates[node]:
            rates[node] = rate
    return rates


@dataclass(slots=True)
class Rival:
    """A logistic of one speculator's guesses, and by how much it beats the counts."""

    logistic: Logistic
    lead: float = 0.0  # nats, fading: the counts' log-loss less its own
    outcomes: int = 0  # it has learnt from


@dataclass(slots=True)
class Estimator:
    """An `Estimates` in plain Python; without `logistics` it is the counts alone."""

    counts: Calibration = field(default_factory=Calibration)
    rivals: dict[str, Rival] = field(default_factory=dict)  # by speculator
    logistics: bool = True
    outcomes: int = 0  # of all guesses, that it has learnt from

    def rates(self, draws: Sequence[Draw], temperature: float) -> list[float]:
        """The probability of each of these draws to become text where its parent did, [len(draws)].

        They are all there are below their parents, in the order in which they were made; `temperature` is
        the request's.
        """
        if not self.logistics:
            return self.counts.rates(draws)
        ahead = {name: rival.logistic for name, rival in self.rivals.items() if rival.lead >= 0}
        rates, behind = list[float](), False
        for draw, features in zip(draws, features_of(draws, temperature), strict=True):
            logistic = ahead.get(draw.speculator)
            if logistic is None:
                if draw.speculator in self.rivals:
                    behind = True
                    rates.append(-1.0)
                    continue
                logistic = ahead[draw.speculator] = self._meet(draw).logistic
            rates.append(logistic.probability(features))
        if behind:
            counted = self.counts.rates(draws)
            rates = [known if rate < 0 else rate for rate, known in zip(rates, counted, strict=True)]
        return rates

    def node_rates(self, draws: Sequence[Draw], num_nodes: int, temperature: float) -> list[float]:
        """As Estimates says."""
        return rates_of_nodes(draws, self.rates(draws, temperature), num_nodes)

    def learn(self, below: Sequence[Draw], accepted: int | None, temperature: float) -> None:
        """As Estimates says."""
        self.outcomes += len(below)
        if self.logistics and below:
            counted = self.counts.rates(below)
            for draw, features, rate in zip(below, features_of(below, temperature), counted, strict=True):
                rival = self.rivals.get(draw.speculator) or self._meet(draw)
                likely, became = rival.logistic.probability(features), draw.node == accepted
                rate = max(UNSURE, min(1 - UNSURE, rate))
                gain = likely / rate if became else (1 - likely) / (1 - rate)
                rival.lead = max(-MOST_LEAD, min(MOST_LEAD, _MEMORY * rival.lead + math.log(gain)))
                rival.outcomes += 1
                rival.logistic.learn(features, likely, became)
        self.counts.learn(below, accepted)

    def to_json(self) -> dict[str, Any]:
        """What it has learnt, as JSON values."""
        logistics = {
            name: {"weights": rival.logistic.named(), "lead": rival.lead, "outcomes": rival.outcomes}
            for name, rival in self.rivals.items()
        }
        return {"outcomes": self.outcomes, "counts": self.counts.to_json(), "logistics": logistics}

    def recall(self, told: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave; raises ValueError or KeyError, and then takes nothing."""
        logistics = bounded.mapping(told["logistics"])
        if len(logistics) > _MOST_RIVALS:
            raise ValueError(f"it has {len(logistics)} logistics, more than {_MOST_RIVALS}")
        rivals = {
            bounded.name(name): Rival(
                Logistic.from_named(bounded.mapping(rival["weights"])),
                bounded.real(rival["lead"], -MOST_LEAD, MOST_LEAD),
                bounded.whole(rival["outcomes"], 0, _MOST_OUTCOMES),
            )
            for name, rival in ((name, bounded.mapping(one)) for name, one in logistics.items())
        }
        outcomes = bounded.whole(told["outcomes"], 0, _MOST_OUTCOMES)
        self.counts.recall(told["counts"])
        self.rivals, self.outcomes = rivals, outcomes

    def _meet(self, draw: Draw) -> Rival:
        """Begin a logistic for a speculator that was not known: by what its guesses look like."""
        rival = self.rivals[draw.speculator] = Rival(Logistic(prior(len(draw.evidence))))
        return rival
