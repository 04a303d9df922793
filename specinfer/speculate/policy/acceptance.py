"""Acceptance probabilities of guesses, learned from their outcomes and kept between runs (memory.py).

Two things are learned. A speculator gives each token a confidence, given the tokens before it
(`Draw.confidence`): a draft model its own probability, a lookup the length of the match. Logistic curves map
the confidence to the acceptance probability: for each speculator, one for its first choice below a node and
one for its others. For drafts, the acceptance rate at each level of their trees is counted, for all requests
and by temperature, because the confidences of a level are not known before it is drawn.

Recent outcomes have more weight, so the rates follow the texts.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from specinfer.sampling_params import GREEDY_BELOW
from specinfer.tree import TokenTree
from specinfer.tree.draw import as_runs
from specinfer.tree.token_tree import next_nodes

MAX_LOG_ODDS: Final = 6  # confidences are rounded to log-odds from -6 to 6, probabilities of 0.2% to 99.8%
_ODDS: Final = range(-MAX_LOG_ODDS, MAX_LOG_ODDS + 1)
_EDGES: Final = [1 / (1 + math.exp(-odds - 0.5)) for odds in _ODDS[:-1]]  # confidences between these
OFFSET_RATE: Final = 0.03  # learning rate of a curve's offset
SLOPE_RATE: Final = 0.01  # learning rate of its slope, per unit of log-odds
_QUICK: Final = 7.0  # initial factor of the offset's learning rate, for answers with few steps
_SLOWING: Final = 0.97  # decay of this factor at each outcome
MAX_OFFSET: Final = 6.0  # largest magnitude of an offset
MAX_SLOPE: Final = 3.0

# With drafts in the engine, the stated odds of other speculators are first multiplied by this: lookups were
# right .64 of the times they stated .88, and .5 to .76 for .95.
_STATED: Final = 0.4

# Winner's-curse correction. With drafts in the engine, the odds of other speculators are always multiplied by
# this: estimates of lookups are right on average, but a step selects those that are too high.
LOOKUP_ODDS: Final = 0.5

# Upper bounds of temperature classes whose requests are counted together; a last class has higher ones.
TEMPERATURES: Final = (GREEDY_BELOW, 0.5, 1.0)
# Offsets of the curves of `self` drafts, for other choices and first ones: about the values that
# Qwen2.5-Coder-1.5B in bfloat16 with its int4 draft reaches within six answers.
_SELF_OFFSETS: Final = (-0.6, 0.8)

_FIRST_RATE: Final = 0.7  # prior rate of a draft's first guess
_LEVEL_PRIOR: Final = 3.0  # weight, in guesses, of the rate of the level above as a prior
_CLASS_PRIOR: Final = 4.0  # weight, in guesses, of the rate of all requests as a prior for a class
_LEVEL_MEMORY: Final = 0.97  # decay of a level's counts at each outcome: about the last 30 count
# Counts of a level with a right first guess, with another right one, and with none.
_FIRST, _OTHER, _MISSED = np.array([[1, 0, 1], [0, 1, 1], [0, 0, 1]])


class LevelRate(NamedTuple):
    """Acceptance probabilities of the first guess below a node, and of all other guesses together."""

    first: float
    other: float

    @property
    def any(self) -> float:
        """Probability that one of the guesses is accepted."""
        return self.first + self.other


class DraftLevels:
    """Counts of one draft's right guesses at each of `depth` levels, among those below an accepted node.

    All requests are counted together, and by temperature class.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        # Right first guesses, right others, and tries, by level, of all requests and then of each class,
        # [classes, depth, 3].
        self.counts = np.zeros((len(TEMPERATURES) + 2, depth, 3))
        self._rates: dict[int, list[LevelRate]] = {}  # cache by temperature class

    def learn(self, level: int, choice: int | None, temperature: float) -> None:
        """Count which of a request's guesses at a level was right, or None; level 0 is below the root."""
        self._rates = {}
        for counts in self.counts[0], self.counts[1 + bisect_left(TEMPERATURES, temperature)]:
            if level == 0:  # also fades levels that are not tried now
                counts *= _LEVEL_MEMORY
            if level < self.depth:
                counts[level] += _MISSED if choice is None else _OTHER if choice else _FIRST

    def fade(self, kept: float) -> None:
        """Multiply all counts by `kept`."""
        self._rates = {}
        self.counts *= kept

    def usual_rates(self) -> list[LevelRate]:
        """Return the rates of all requests' guesses at each level below accepted nodes, [depth]."""
        rates, above = list[LevelRate](), LevelRate(_FIRST_RATE, 0.0)
        for counts in self.counts[0].tolist():
            above = _rate(counts, above, _LEVEL_PRIOR)
            rates.append(above)
        return rates

    def rates(self, temperature: float) -> list[LevelRate]:
        """Return the rates of guesses at each level below accepted nodes for a request, [depth].

        They combine the counts of its temperature class with those of all requests.
        """
        kind = 1 + bisect_left(TEMPERATURES, temperature)
        if kind not in self._rates:
            levels = zip(self.counts[kind].tolist(), self.usual_rates(), strict=True)
            self._rates[kind] = [_rate(counts, usual, _CLASS_PRIOR) for counts, usual in levels]
        return self._rates[kind]


def _rate(counts: Sequence[float], usual: LevelRate, prior: float) -> LevelRate:
    """Return the rate of one level's counts, with the rate `usual` as a prior that weighs `prior` tries."""
    firsts, others, tries = counts
    missed = 1 - usual.first
    behind = usual.other / missed if missed > 0 else 0.0
    first = (firsts + prior * usual.first) / (tries + prior)
    other = (others + prior * behind) / (tries - firsts + prior)
    return LevelRate(first, (1 - first) * other)


@dataclass(slots=True)
class Curve:
    """Acceptance probability by the log-odds of the confidence: a logistic curve, learned online.

    Each outcome moves offset and slope against the gradient of its log-loss at constant learning rates; the
    rate of the offset is multiplied by `hurry`, which decays to 1.
    """

    offset: float = 0.0
    slope: float = 1.0
    hurry: float = 1.0

    def rate(self, odds: float, less: float = 0.0) -> float:
        """Return the acceptance probability of a guess; `less` is subtracted from its log-odds."""
        return 1 / (1 + math.exp(less - self.offset - self.slope * odds))

    def learn(self, odds: float, became: bool) -> None:
        """Learn whether a guess of this confidence became text."""
        error = became - self.rate(odds)
        self.offset = min(MAX_OFFSET, max(-MAX_OFFSET, self.offset + self.hurry * OFFSET_RATE * error))
        self.hurry = max(1.0, self.hurry * _SLOWING)
        self.slope = min(MAX_SLOPE, max(0.0, self.slope + SLOPE_RATE * error * odds))


class AcceptanceRates:
    """Learned acceptance probabilities of all speculators.

    `depths` are the levels to count of each draft with a price. With `quick` the first outcomes weigh more,
    for engines whose steps take seconds, so that an answer has few.
    """

    def __init__(self, depths: Mapping[str, int] | None = None, *, quick: bool = False) -> None:
        self._hurry = _QUICK if quick else 1.0
        self.outcomes = 0  # number of learned outcomes
        self.levels = {name: DraftLevels(depth) for name, depth in (depths or {}).items()}
        # By speculator: the curve of other choices and that of first choices.
        self.curves: dict[str, tuple[Curve, Curve]] = {}
        self._tables: dict[str, list[list[float]]] = {}  # cache of both curves' rates, by confidence

    def node_rates(self, tree: TokenTree) -> list[float]:
        """Return the acceptance probability of every node, given that its parent is accepted, [num_nodes].

        The root's is 1. A speculator's first draw below a node is its first choice there. A node that several
        speculators propose has the highest of their probabilities.
        """
        rates = [0.0] * len(tree.token_ids)
        chosen: dict[str, set[int]] = {}
        for run in as_runs(tree.draws).runs:
            tables, above = self._of(run.speculator), chosen.setdefault(run.speculator, set())
            kinds = map(bisect_left, repeat(_EDGES), run.confidences)
            for parent, node, kind in zip(run.parents, run.nodes, kinds, strict=True):
                rate = tables[parent not in above][kind]
                above.add(parent)
                if rate > rates[node]:
                    rates[node] = rate
        rates[0] = 1.0
        return rates

    def learn(self, tree: TokenTree, committed: Sequence[int], temperature: float) -> None:
        """Learn from all guesses below accepted nodes, verified or not, as the next token is known there."""
        becomes = next_nodes(tree, committed)
        # By speculator and parent: 0 if its first choice was right, 1 if another was, else None.
        right: dict[tuple[str, int], int | None] = {}
        for run in as_runs(tree.draws).runs:
            name, curves = run.speculator, self._curves(run.speculator)
            self._tables.pop(name, None)
            for parent, node, confidence in zip(run.parents, run.nodes, run.confidences, strict=True):
                if parent not in becomes:
                    continue
                key, became = (name, parent), becomes[parent] == node
                is_first = key not in right
                curves[is_first].learn(bisect_left(_EDGES, confidence) - MAX_LOG_ODDS, became)
                self.outcomes += 1
                if right.setdefault(key) is None and became:
                    right[key] = 0 if is_first else 1
        levels = {node: level for level, node in enumerate(becomes)}
        for (name, parent), choice in right.items():
            if name in self.levels:
                self.levels[name].learn(levels[parent], choice, temperature)

    def expect_self_draft(self, name: str) -> None:
        """Start the curves of a `self` draft with a prior: it is right more often than its confidences."""
        other, first = _SELF_OFFSETS
        self.curves[name] = Curve(other, hurry=self._hurry), Curve(first, hurry=self._hurry)

    def _curves(self, name: str) -> tuple[Curve, Curve]:
        """Return a speculator's curves, of other choices and of first choices."""
        if name not in self.curves:
            offset = math.log(_STATED) if self._is_beside_drafts(name) else 0.0
            self.curves[name] = Curve(offset, hurry=self._hurry), Curve(offset, hurry=self._hurry)
        return self.curves[name]

    def _of(self, name: str) -> list[list[float]]:
        """Return a speculator's rates by confidence, for other choices and for first choices."""
        if name not in self._tables:
            less = -math.log(LOOKUP_ODDS) if self._is_beside_drafts(name) else 0.0
            curves = self._curves(name)
            self._tables[name] = [[curve.rate(odds, less) for odds in _ODDS] for curve in curves]
        return self._tables[name]

    def _is_beside_drafts(self, name: str) -> bool:
        return name not in self.levels and bool(self.levels)
