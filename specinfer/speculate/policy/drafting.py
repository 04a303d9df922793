"""Decide when a draft's pass is worth its time: for its first level, for further levels, and for reading.

A draft reads the tokens of a text that it has not read before it guesses, once for all later steps of the
text. So each step is charged a part of the reading, in proportion to the tokens that the draft yields there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.acceptance import AcceptanceRates, DraftLevels, LevelRate
from specinfer.speculate.policy.choose import StepCosts, best_count, path_probabilities
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled
from specinfer.tree.merging import pinned_nodes
from specinfer.tree.token_tree import Expansion, child_of

# Factor of a level's cost when the worth of reading a prompt is judged: the draft will start only in those
# steps where it yields more than usual.
_LEVEL: Final = 0.9
_MEMORY: Final = 0.97  # decay of a mean at each value
_PRIOR: Final = 3.0  # weight of a mean's prior, in values
# Prior of the probability that other speculators do not hold the first level's token, by whether the request
# has a prediction, which probably holds most of the answer.
_UNCOVERED_PRIOR: Final = {False: 1.0, True: 0.3}
# Prior of the tokens of a step with the guesses of other speculators, likewise.
_TOKENS_PRIOR: Final = {False: 1.0, True: 8.0}
_REFUSED: Final = 16  # consecutive steps in which a draft did not start; then its counts and costs decay
_REFUSED_MEMORY: Final = 0.8  # factor of this decay, as a draft that does not run yields no new outcomes
_MAX_RATE: Final = 0.99  # maximum rate of a level; with 1, any number of levels would be worth it
USUAL_UNREAD: Final = 2  # tokens that a draft reads in every step: the root, and a last guess it has not run


class PricedDraft(NamedTuple):
    """A draft whose passes have a known cost."""

    costs: CostModel
    expansion: Expansion  # shape of its sampled trees

    def width(self, level: int) -> int:
        """Return the number of samples below a node at this depth."""
        return self.expansion.widths[min(level, self.expansion.depth - 1)]

    def reading(self, unread: Sequence[int]) -> list[float]:
        """Return the seconds that each request's unread tokens beyond USUAL_UNREAD add to a shared pass."""
        together, expected = USUAL_UNREAD * len(unread), self.costs.expected
        without = expected(together)
        return [
            expected(together + left - USUAL_UNREAD) - without if left > USUAL_UNREAD else 0.0
            for left in unread
        ]


class GrowingGuesses:
    """One request's guesses while a draft adds to them; `others` is the merged tree of earlier speculators.

    A level is worth only the tokens that the other guesses do not hold. The request may have `max_nodes`
    nodes, the root included; with `all_stay` all of them are verified.
    """

    def __init__(
        self, others: TokenTree, acceptance: AcceptanceRates, max_nodes: int, *, all_stay: bool
    ) -> None:
        self._others, self._acceptance, self.all_stay = others, acceptance, all_stay
        self._rates = acceptance.node_rates(others)
        held = [0.0] * len(self._rates)
        for parent, rate in zip(others.parents[1:], self._rates[1:], strict=True):
            held[parent] += rate
        # Probability that no guess holds the token after each node.
        self.uncovered = [max(0.0, 1.0 - of) for of in held]
        self._pinned = pinned_nodes(others)
        self._room = max_nodes - 1
        self._places = [0]  # index of each of the draft's nodes in `others`, or -1
        self._probabilities = [1.0]  # acceptance probabilities of the draft's nodes
        # Acceptance probabilities of its samples, and of its other nodes that `others` lacks.
        self._sampled, self._dropped = list[float](), list[float]()
        self._weigh()

    @property
    def samples(self) -> bool:
        """True if the draft draws nodes that cannot be dropped."""
        return bool(self._sampled)

    def grow(self, tree: TokenTree) -> None:
        """Add the new nodes of the draft's tree."""
        probabilities, places, others = self._probabilities, self._places, self._others
        rates, sampled = self._acceptance.node_rates(tree), any_sampled(tree.draws)
        for node in range(len(places), tree.num_nodes):
            parent, rate, place = tree.parents[node], rates[node], -1
            if (above := places[parent]) >= 0:
                found = child_of(others.token_ids, others.parents, above, tree.token_ids[node])
                place = -1 if found is None else found
            if place >= 0:
                rate = self._rates[place] = max(rate, self._rates[place])
            likely = rate * probabilities[parent]
            places.append(place)
            probabilities.append(likely)
            if sampled:
                self._sampled.append(likely)
            elif place < 0:
                self._dropped.append(likely)
        self._weigh()

    def _weigh(self) -> None:
        """Update all probabilities; agreement of the draft makes others' later guesses likelier."""
        pinned = self._pinned
        # Acceptance probabilities of others' nodes.
        self.known = path_probabilities(self._rates, self._others.parents)
        self.nodes = len(pinned) + len(self._sampled)  # nodes that cannot be dropped
        # Expected tokens of the nodes that cannot be dropped.
        self.tokens = sum([self.known[node] for node in pinned]) + sum(self._sampled)
        droppable = [p for node, p in enumerate(self.known) if node and node not in pinned] + self._dropped
        droppable.sort(reverse=True)
        # The best other nodes within the budget.
        self.droppable = droppable[: max(0, self._room - self.nodes)]

    def gain(self, end: int, rate: LevelRate, price: float) -> float:
        """Return the expected tokens of the children of a node of the draft's tree.

        `rate` is that of the level below the node. The first child's row of the target is not charged here;
        others cost `price`. Samples are all verified, and the caller counts their rows.
        """
        place = self._places[end]
        arrives = self._probabilities[end] * (self.uncovered[place] if place >= 0 else 1.0)
        return gain(arrives, rate, 0.0 if self.samples else price)


def gain(arrives: float, rate: LevelRate, price: float) -> float:
    """Return the expected tokens of a level below a node that is reached with probability `arrives`."""
    return arrives * rate.first + max(0.0, arrives * rate.other - price)


def useful_levels(best: float, rate: float, price: float) -> float:
    """Return the number of levels, at least 1, that are worth `price` tokens each.

    The first one yields `best` tokens, each further one `rate` times those of the level above.
    """
    if best <= price or rate <= 0:
        return 1.0
    return 1.0 + math.log(price / best) / math.log(min(rate, _MAX_RATE))


def keep_largest(gains: Sequence[float], count: int) -> list[float]:
    """Return the gains with all but the `count` largest (at least 1) set to 0; ties keep the earlier."""
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    kept = frozenset(order[: max(1, count)])
    return [of if number in kept else 0.0 for number, of in enumerate(gains)]


def children_each(tree: TokenTree) -> float:
    """Return the mean number of children of a tree's inner nodes, at least 1."""
    return max(1.0, (tree.num_nodes - 1) / max(1, len(set(tree.parents)) - 1))


@dataclass(slots=True)
class _FadingMean:
    """Mean of about the last 30 values, with an initial value as a prior."""

    mean: float
    count: float = _PRIOR

    def add(self, value: float) -> None:
        """Add a value."""
        self.count = _MEMORY * self.count + 1
        self.mean += (value - self.mean) / self.count


class DraftStarts:
    """Decides for which requests one draft starts: those whose first level is worth its pass and reading."""

    def __init__(self, draft: PricedDraft, levels: DraftLevels) -> None:
        self._draft = draft
        self._levels = levels
        # Recent means of the probability that others lack the first level's token, and of a step's tokens
        # with their guesses.
        self._left = {predicted: _FadingMean(left) for predicted, left in _UNCOVERED_PRIOR.items()}
        self._made = {predicted: _FadingMean(made) for predicted, made in _TOKENS_PRIOR.items()}
        self._refused = 0  # consecutive steps without a start

    def refused(self) -> None:
        """Count a step in which the draft could guess but was not worth its cost."""
        self._refused += 1
        if self._refused == _REFUSED:
            self._refused = 0
            self._levels.fade(_REFUSED_MEMORY)
            self._draft.costs.fade(_REFUSED_MEMORY)

    def select(
        self,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        growing: Mapping[str, GrowingGuesses],
        costs: StepCosts,
        tokens: float,
        nodes: int,
        row: float,
    ) -> list[bool]:
        """Return for which entries the first level makes the step faster, or later steps for prefill entries.

        Args:
            entries: requests that the draft may guess for.
            unread: tokens of their texts that it would read.
            growing: the other speculators' guesses, by request id, for entries with a tree.
            costs: seconds of the step.
            tokens: expected tokens of the step without the draft.
            nodes: verified guesses of that step, without roots.
            row: seconds of another row of the target's pass in a step without prefill.
        """
        without, price = costs.seconds(nodes), costs.price(tokens, nodes)
        reading = self._draft.reading(unread)
        starts = [False] * len(entries)
        gains, shares = dict[int, float](), dict[int, float]()
        drawing = [i for i, entry in enumerate(entries) if entry.max_nodes > 1]
        for i, entry in enumerate(entries):
            if entry.max_nodes <= 1:
                starts[i] = self._reads(entry, reading[i], len(entries), tokens / without, row)
        for i in drawing:
            brings, part = self._gain(entries[i], growing[entries[i].request.request_id], price)
            if brings * without > reading[i] * part * tokens:
                gains[i], shares[i] = brings, reading[i] * part
        first = sorted(gains, key=gains.__getitem__, reverse=True)
        passes = self._draft.costs.table(USUAL_UNREAD * len(first))
        seconds, shared = list[float](), 0.0
        for more in range(len(first) + 1):
            shared += shares[first[more - 1]] if more else 0.0
            seconds.append(costs.seconds(nodes + more) + passes[USUAL_UNREAD * more] + shared)
        for i in first[: best_count([gains[i] for i in first], tokens, seconds)]:
            starts[i] = True
        if any(starts[i] for i in drawing):
            self._refused = 0
        return starts

    def _gain(self, entry: PlanEntry, guesses: GrowingGuesses, price: float) -> tuple[float, float]:
        """Return the expected tokens of the level, and their part of all tokens expected from the draft."""
        predicted = bool(entry.request.prediction)
        left_of_late, made_of_late = self._left[predicted], self._made[predicted]
        rate = self._rate(entry)
        left_of_late.add(guesses.uncovered[0])
        made_of_late.add(sum([likely for likely in guesses.known if likely > price]))
        brings = gain(guesses.uncovered[0], rate, price)
        return brings, _part(brings, rate.any * left_of_late.mean, made_of_late.mean, entry.room)

    def _reads(self, entry: PlanEntry, read: float, requests: int, pace: float, row: float) -> bool:
        """Return whether a prompt is worth reading, with the usual guesses of other speculators after it.

        Reading takes `read` seconds; without it the engine yields `pace` tokens per second. It is useless if
        the draft has read the text, if no row is left, or if at most two tokens can follow: the first has no
        guesses, and the last needs none.
        """
        if entry.end - entry.start < 2 or entry.room < 3:
            return False
        predicted = bool(entry.request.prediction)
        usual = self._rate(entry).any * self._left[predicted].mean
        part = _part(usual, usual, self._made[predicted].mean, entry.room - 1)
        level = self._draft.costs.table(USUAL_UNREAD * requests)[USUAL_UNREAD * requests] / requests + row
        return usual > (read * part + _LEVEL * level) * pace

    def _rate(self, entry: PlanEntry) -> LevelRate:
        """Return the rate of first guesses for a request."""
        return self._levels.rates(entry.request.params.temperature)[0]


def _part(gain: float, usual: float, made: float, room: int) -> float:
    """Return this step's part of all tokens that a draft is expected to yield for a text it has read.

    It yields `gain` tokens now and `usual` tokens in each later step, which has `made` tokens without it. The
    number of later steps follows from the `room` for tokens; the last token needs no guess.
    """
    later = usual * max(0.0, room - 1 - made - gain) / (made + usual)
    return gain / (gain + later) if gain else 0.0
