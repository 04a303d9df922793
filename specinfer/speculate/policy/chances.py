"""How likely guesses are to become text: learned while they are used, and kept between runs (memory.py).

Two things are learned. A speculator says how sure it is of a token given the tokens before it
(`Draw.confidence`): a draft model its own probability, a lookup how long a match it found. A logistic curve
for each speculator says how often guesses as sure as that became text, apart for its first choice below a
node and its others. And of drafts the rate at each level of their trees is counted, for all requests and by
temperature: before a level is drawn its confidences are not known.

Old outcomes count less, so the rates follow the texts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

from specinfer.sampling_params import GREEDY_BELOW
from specinfer.tree import Draw, TokenTree
from specinfer.tree.draw import as_runs
from specinfer.tree.token_tree import next_nodes

STEEPEST: Final = 6  # confidences are rounded to log-odds from -6 to 6: probabilities of 0.2% to 99.8%
BELIEVED: Final = [1 / (1 + math.exp(-odds)) for odds in range(-STEEPEST, STEEPEST + 1)]
_EDGES: Final = [1 / (1 + math.exp(-odds - 0.5)) for odds in range(-STEEPEST, STEEPEST)]
_FIRST: Final = len(BELIEVED)  # where first choices lie in a table, behind the others
PACE: Final = 0.03  # of an error, that a curve's offset moves by
STEEPENING: Final = 0.01  # of an error, that its slope moves by for each unit of log-odds
_QUICK: Final = 7.0  # times as fast a curve moves at first, where answers have few steps
_SLOWING: Final = 0.97  # of what it is faster, at each outcome
FARTHEST: Final = 6.0  # from 0 that an offset goes
STEEPEST_SLOPE: Final = 3.0

# Beside drafts the odds that others state are multiplied by this at first: lookups were right
# .64 of the times they said .88, and .5 to .76 where they said .95 (docs/lab/2026-11-25-dropped.md).
_STATED: Final = 0.4

# Beside drafts others' odds are multiplied by this at any time. Estimates of lookups are right on average,
# but those that a step is built on are the ones that came out too high (winner's curse).
BESIDE: Final = 0.5

# Temperatures up to which requests are counted together, and all above the last.
HEATS: Final = (GREEDY_BELOW, 0.5, 1.0)
# Offsets of a twin's curves, of other choices and of first ones: about what Qwen2.5-Coder-1.5B in bfloat16
# and its twin in int4 come to within six answers.
_TWIN: Final = (-0.6, 0.8)

_FIRST_RATE: Final = 0.7  # of a draft's first guess, before anything was seen
_THOUGHT: Final = 3.0  # guesses; a level nobody has been to is thought to be like the one above it
_LIKE_ALL: Final = 4.0  # outcomes at a temperature that are thought to have come, as often right as all are
_LEVEL_MEMORY: Final = 0.97  # what a level's count keeps at each new outcome: the last 30 decide


class LevelRate(NamedTuple):
    """How likely the first guess below a node of the text is right, and one of the others."""

    first: float
    other: float

    @property
    def any(self) -> float:
        """How likely one of all is."""
        return self.first + self.other


class LevelCounts:
    """How often guesses at each of `depth` levels held the next token, where those above them did."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.firsts, self.others, self.tries = [0.0] * depth, [0.0] * depth, [0.0] * depth

    def learn(self, level: int, choice: int | None) -> None:
        """Count which of the guesses at `level`, 0 being the root's children, was right; None: none was."""
        if level == 0:  # what is not tried any more is forgotten as well
            self.fade(_LEVEL_MEMORY)
        if level < self.depth:
            self.firsts[level] += choice == 0
            self.others[level] += bool(choice)
            self.tries[level] += 1

    def fade(self, kept: float) -> None:
        """Let everything that was counted count less."""
        for counts in (self.firsts, self.others, self.tries):
            counts[:] = [count * kept for count in counts]

    def rate(self, level: int, usual: LevelRate, thought: float) -> LevelRate:
        """The rate of one level, if `thought` tries before those counted came out as `usual` has it."""
        firsts, others, tries = self.firsts[level], self.others[level], self.tries[level]
        missed = 1 - usual.first
        behind = usual.other / missed if missed > 0 else 0.0
        first = (firsts + thought * usual.first) / (tries + thought)
        other = (others + thought * behind) / (tries - firsts + thought)
        return LevelRate(first, (1 - first) * other)

    def rates(self) -> list[LevelRate]:
        """How likely guesses at each level are right where a text got there, [depth]."""
        rates, above = list[LevelRate](), LevelRate(_FIRST_RATE, 0.0)
        for level in range(self.depth):
            above = self.rate(level, above, _THOUGHT)
            rates.append(above)
        return rates

    def to_json(self) -> list[list[float]]:
        """Of each level how often the first guess and others were right, and the tries."""
        return [list(level) for level in zip(self.firsts, self.others, self.tries, strict=True)]

    def recall(self, levels: Sequence[Sequence[float]]) -> None:
        """Take over the result of `to_json`, of as many levels as there are."""
        for level, (firsts, others, tries) in enumerate(levels[: self.depth]):
            self.firsts[level], self.others[level], self.tries[level] = firsts, others, tries


class DraftLevels:
    """The level counts of one draft: of all requests, and of those at about one temperature."""

    def __init__(self, depth: int) -> None:
        self.all = LevelCounts(depth)
        self.alike = [LevelCounts(depth) for _ in range(len(HEATS) + 1)]
        self._rates: dict[int, list[LevelRate]] = {}  # by temperature; made when asked for

    def learn(self, level: int, choice: int | None, temperature: float) -> None:
        """Count which of a request's guesses at a level was right; None: none was."""
        self.all.learn(level, choice)
        self.alike[bisect_left(HEATS, temperature)].learn(level, choice)
        self._rates = {}

    def rates(self, temperature: float) -> list[LevelRate]:
        """How likely guesses at each level are right for a request where its text got there, [depth].

        The counts at about its temperature stand beside those of all requests.
        """
        heat = bisect_left(HEATS, temperature)
        rates = self._rates.get(heat)
        if rates is None:
            rates = self._rates[heat] = [
                self.alike[heat].rate(level, usual, _LIKE_ALL) for level, usual in enumerate(self.all.rates())
            ]
        return rates

    def fade(self, kept: float) -> None:
        """Let everything that was counted count less."""
        self._rates = {}
        for counts in (self.all, *self.alike):
            counts.fade(kept)


@dataclass(slots=True)
class Curve:
    """How likely guesses become text, by the log-odds of their confidence: a logistic that learns in use.

    Each outcome moves offset and slope against the gradient of its log-loss, always by the same measure;
    the offset of one that is in a `hurry` so many times as fast at first.
    """

    offset: float = 0.0
    slope: float = 1.0
    hurry: float = 1.0

    def rate(self, odds: float, less: float = 0.0) -> float:
        """The probability of a guess of this confidence; `less` is taken from its log-odds."""
        return 1 / (1 + math.exp(less - self.offset - self.slope * odds))

    def learn(self, odds: float, became: bool) -> None:
        """Learn that a guess of this confidence became text, or did not."""
        error = became - self.rate(odds)
        self.offset = min(FARTHEST, max(-FARTHEST, self.offset + self.hurry * PACE * error))
        if self.hurry > 1.0:
            self.hurry = max(1.0, self.hurry * _SLOWING)
        self.slope = min(STEEPEST_SLOPE, max(0.0, self.slope + STEEPENING * error * odds))


class Chances:
    """What is learned of all speculators; `depths` are the levels counted of each draft that has a price.

    With `quick` the first outcomes count for more: an answer has few steps where each takes seconds.
    """

    def __init__(self, depths: Mapping[str, int] | None = None, *, quick: bool = False) -> None:
        self._hurry = _QUICK if quick else 1.0
        self.outcomes = 0  # of all guesses, that were counted
        self.levels = {name: DraftLevels(depth) for name, depth in (depths or {}).items()}
        # By speculator, of others than first choices and of these.
        self.curves: dict[str, tuple[Curve, Curve]] = {}
        self._tables: dict[str, list[float]] = {}  # the rates of both, by confidence; made when asked for

    def rates(self, draws: Sequence[Draw]) -> list[float]:
        """How likely each of these draws is to become text where its parent did, [len(draws)].

        A speculator's first draw below a node is its first choice there.
        """
        rates, seen = list[float](), set[tuple[str, int]]()
        for draw in draws:
            choice = draw.speculator, draw.parent
            at = bisect_left(_EDGES, draw.confidence)
            rates.append(self._of(draw.speculator)[at if choice in seen else at + _FIRST])
            seen.add(choice)
        return rates

    def node_rates(self, tree: TokenTree) -> list[float]:
        """How likely every node is to become text where its parent did, [num_nodes]; the root's is 1.

        Of several speculators that propose a node the most hopeful one is believed.
        """
        rates = [0.0] * len(tree.token_ids)
        chosen: dict[str, set[int]] = {}
        for run in as_runs(tree.draws).runs:
            table, above = self._of(run.speculator), chosen.setdefault(run.speculator, set())
            kinds = map(bisect_left, repeat(_EDGES), run.confidences)
            for parent, node, kind in zip(run.parents, run.nodes, kinds, strict=True):
                if parent in above:
                    rate = table[kind]
                else:
                    rate = table[kind + _FIRST]
                    above.add(parent)
                if rate > rates[node]:
                    rates[node] = rate
        rates[0] = 1.0
        return rates

    def learn(self, tree: TokenTree, committed: Sequence[int], temperature: float) -> None:
        """Learn from the guesses below all nodes of the text, verified or not: their next token is known."""
        becomes = next_nodes(tree, committed)
        chosen: dict[str, set[int]] = {}
        numbers: dict[tuple[str, int], int] = {}  # of draws so far, by draft and parent
        right: dict[tuple[str, int], int] = {}  # which of them held the token
        for run in as_runs(tree.draws).runs:
            name, above = run.speculator, chosen.setdefault(run.speculator, set())
            leveled, (other, first) = name in self.levels, self._curves(name)
            self._tables.pop(name, None)
            for i, parent in enumerate(run.parents):
                if parent not in becomes:
                    continue
                became = becomes[parent] == run.nodes[i]
                odds = bisect_left(_EDGES, run.confidences[i]) - STEEPEST
                (other if parent in above else first).learn(odds, became)
                self.outcomes += 1
                above.add(parent)
                if leveled:
                    number = numbers[name, parent] = numbers.get((name, parent), -1) + 1
                    if became:
                        right.setdefault((name, parent), number)
        if numbers:
            levels = {node: level for level, node in enumerate(becomes)}
            for name, parent in numbers:
                self.levels[name].learn(levels[parent], right.get((name, parent)), temperature)

    def expect_twin(self, name: str) -> None:
        """Believe of a draft that is its target in fewer bits that it is right more often than it says."""
        other, first = _TWIN
        self.curves[name] = Curve(other, hurry=self._hurry), Curve(first, hurry=self._hurry)

    def recall(self, curves: Mapping[str, tuple[Curve, Curve]]) -> None:
        """Take over curves of earlier runs."""
        self.curves.update(curves)
        self._tables = {}

    def _curves(self, name: str) -> tuple[Curve, Curve]:
        """A speculator's curves, of others than first choices and of these."""
        if name not in self.curves:
            offset = math.log(_STATED) if self._beside_drafts(name) else 0.0
            self.curves[name] = Curve(offset, hurry=self._hurry), Curve(offset, hurry=self._hurry)
        return self.curves[name]

    def _of(self, name: str) -> list[float]:
        """A speculator's rates by confidence: of others than first choices, and behind them of these."""
        table = self._tables.get(name)
        if table is None:
            less = -math.log(BESIDE) if self._beside_drafts(name) else 0.0
            table = self._tables[name] = [
                curve.rate(odds, less)
                for curve in self._curves(name)
                for odds in range(-STEEPEST, STEEPEST + 1)
            ]
        return table

    def _beside_drafts(self, name: str) -> bool:
        return name not in self.levels and bool(self.levels)
