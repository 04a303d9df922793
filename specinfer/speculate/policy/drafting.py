"""Decide when a draft's pass is worth its time: for its first level, for further levels, and for reading.

A draft reads the tokens of a text that it has not read before it guesses, once for all later steps of the
text. So each step is charged a part of the reading, in proportion to the tokens that the draft yields there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.acceptance import AcceptanceRates, DraftLevels, LevelRate
from specinfer.speculate.policy.choose import Candidates, StepCosts, best_count, path_probabilities
from specinfer.speculate.policy.policy import has_own_size
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled
from specinfer.tree.merging import MergedTree
from specinfer.tree.token_tree import Expansion

# Factor of a level's cost when the worth of reading a prompt is judged: the draft will start only in those
# steps where it yields more than usual.
_LEVEL: Final = 0.9
_MEMORY: Final = 0.97  # decay of a mean at each value
_PRIOR: Final = 3.0  # weight of a mean's prior, in values
_REFUSED: Final = 16  # consecutive steps in which a draft did not start; then its counts and costs decay
_REFUSED_MEMORY: Final = 0.8  # factor of this decay, as a draft that does not run yields no new outcomes
_MAX_RATE: Final = 0.99  # maximum rate of a level; with 1, any number of levels would be worth it
USUAL_UNREAD: Final = 2  # tokens that a draft reads in every step: the root, and a last guess it has not run


class PricedDraft(NamedTuple):
    """A draft whose passes have a known cost."""

    costs: CostModel
    expansion: Expansion  # shape of its sampled trees
    # True if the levels of a tree divide its node budget: where nodes are so cheap that dozens are drawn per
    # level, the first levels would use all of it.
    divides_budget: bool = False

    def width(self, level: int) -> int:
        """Return the number of samples below a node at this depth."""
        return self.expansion.widths[min(level, self.expansion.depth - 1)]

    def reading(self, unread: Sequence[int]) -> list[float]:
        """Return the seconds that each request's unread tokens beyond USUAL_UNREAD add to a shared pass."""
        usual = USUAL_UNREAD * len(unread)
        without = self.costs.expected(usual)
        return [self.costs.expected(usual + max(0, left - USUAL_UNREAD)) - without for left in unread]


class GrowingGuesses(Candidates):
    """One request's guesses while a draft adds to them; the tree is that of earlier speculators.

    A level is worth only the tokens that the other guesses do not hold.
    """

    def __init__(self, entry: PlanEntry, tree: TokenTree, acceptance: AcceptanceRates) -> None:
        super().__init__(entry, tree, acceptance)
        self._acceptance, self._merged = acceptance, MergedTree(tree)
        self._places = [0]  # each of the draft's nodes in the merged tree
        self.samples = False  # True if the draft draws nodes that cannot be dropped
        held = [0.0] * tree.num_nodes
        for parent, rate in zip(tree.parents[1:], self.rates[1:], strict=True):
            held[parent] += rate
        # Probability that no earlier guess holds the token after each node.
        self.uncovered = [max(0.0, 1.0 - of) for of in held]

    def grow(self, tree: TokenTree) -> None:
        """Add the new nodes of the draft's tree; where it agrees, others' later guesses become likelier."""
        new, others, places = len(self._places), self.tree.num_nodes, self._places
        self._merged.place(tree, places, others)
        self.rates += [0.0] * (len(self._merged.parents) - len(self.rates))
        for place, rate in zip(places[new:], self._acceptance.node_rates(tree)[new:], strict=True):
            self.rates[place] = max(rate, self.rates[place])
        self.probabilities = path_probabilities(self.rates, self._merged.parents)
        if any_sampled(tree.draws):
            self.samples = True
            # Samples count beside the guesses with which they agree: counted once, steps were .99 as fast.
            self.probabilities += [self.probabilities[place] for place in places[1:] if place < others]
            self.pinned.update(range(others, len(self.probabilities)))

    def gain(self, end: int, rate: LevelRate, price: float) -> float:
        """Return the expected tokens of the children of a node of the draft's tree.

        `rate` is that of the level below the node. The first child's row of the target is not charged here;
        others cost `price`. Samples are all verified, and the caller counts their rows.
        """
        place = self._places[end]
        arrives = self.probabilities[place] * (self.uncovered[place] if place < len(self.uncovered) else 1.0)
        return arrives * rate.first + max(0.0, arrives * rate.other - (0.0 if self.samples else price))


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
class _Usual:
    """Means of about the last 30 steps of requests, with initial values as a prior."""

    uncovered: float  # probability that other speculators do not hold the first level's token
    made: float  # tokens of a step with their guesses
    count: float = _PRIOR

    def add(self, uncovered: float, made: float) -> None:
        """Add a step of a request."""
        self.count = _MEMORY * self.count + 1
        self.uncovered += (uncovered - self.uncovered) / self.count
        self.made += (made - self.made) / self.count


class Drafting:
    """Decides where one draft starts and goes on: where its next level is worth its pass and reading."""

    def __init__(self, draft: PricedDraft, levels: DraftLevels) -> None:
        self.draft, self._levels = draft, levels
        # By whether a request has a prediction, which probably holds most of the answer.
        self._usual = {False: _Usual(1.0, 1.0), True: _Usual(0.3, 8.0)}
        self._refused = 0  # consecutive steps without a start

    def count(self, *, started: bool) -> None:
        """Count a step in which the draft could guess, and whether it started."""
        self._refused = 0 if started else self._refused + 1
        if not started and self._refused % _REFUSED == 0:
            self._levels.fade(_REFUSED_MEMORY)
            self.draft.costs.fade(_REFUSED_MEMORY)

    def starts(
        self,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        growing: Mapping[str, GrowingGuesses],
        step: StepCosts,
    ) -> list[bool]:
        """Return for which entries the first level makes the step faster, or later steps for prefill entries.

        Requests with their own size always start.

        Args:
            entries: requests that the draft may guess for.
            unread: tokens of their texts that it would read.
            growing: the other speculators' guesses, by request id, for entries with a tree.
            step: the step without the draft.
        """
        without, price = step.seconds(), step.price
        starts = [*map(has_own_size, entries)]
        free = [i for i, own in enumerate(starts) if not own]
        reading = dict(zip(free, self.draft.reading([unread[i] for i in free]), strict=True))
        gains, shares = dict[int, float](), dict[int, float]()
        # Prompts come first, as their prospects are those before this step.
        for i in sorted(free, key=lambda i: entries[i].max_nodes > 1):
            entry = entries[i]
            if entry.max_nodes <= 1:
                starts[i] = self._reads(entry, reading[i], len(free), step)
                continue
            usual, guesses = self._usual[bool(entry.request.prediction)], growing[entry.request.request_id]
            rate = self._levels.rates(entry.request.params.temperature)[0]
            usual.add(guesses.uncovered[0], sum([p for p in guesses.probabilities if p > price]))
            brings = guesses.gain(0, rate, price)
            share = reading[i] * _part(brings, rate.any * usual.uncovered, usual.made, entry.room)
            if brings * without > share * step.tokens:
                gains[i], shares[i] = brings, share
        first = sorted(gains, key=gains.__getitem__, reverse=True)
        passes = self.draft.costs.table(USUAL_UNREAD * len(first))[::USUAL_UNREAD]
        shared = accumulate([shares[i] for i in first], initial=0.0)
        seconds = [step.seconds(more) + passes[more] + read for more, read in enumerate(shared)]
        for i in first[: best_count([gains[i] for i in first], step.tokens, seconds)]:
            starts[i] = True
        return starts

    def gains(
        self,
        entry: PlanEntry,
        growing: GrowingGuesses,
        tree: TokenTree,
        ends: Sequence[int],
        step: StepCosts,
    ) -> list[float]:
        """Return the expected tokens of the next level below each of `ends` of the draft's tree.

        If levels divide the node budget, it is 0 for ends beyond this level's part.
        """
        depths, deepest, price = tree.depths(), self._levels.depth, step.price
        rates = self._levels.rates(entry.request.params.temperature)
        gains = [growing.gain(end, rates[min(depths[end], deepest - 1)], price) for end in ends]
        if not (self.draft.divides_budget and gains):
            return gains
        level = depths[ends[-1]]
        level_price = step.tokens * self.draft.costs.expected(1) / step.seconds()
        wanted = useful_levels(max(gains), rates[min(level, deepest - 1)].first, level_price)
        room = entry.max_nodes - tree.num_nodes
        return keep_largest(gains, int(room / (children_each(tree) * min(wanted, deepest - level))))

    def _reads(self, entry: PlanEntry, read: float, requests: int, step: StepCosts) -> bool:
        """Return whether a prompt is worth reading, with the usual guesses of other speculators after it.

        Reading takes `read` seconds. It is useless if the draft has read the text, if no row is left, or if
        at most two tokens can follow: the first has no guesses, and the last needs none.
        """
        if entry.end - entry.start < 2 or entry.room < 3:
            return False
        usual = self._usual[bool(entry.request.prediction)]
        brings = self._levels.rates(entry.request.params.temperature)[0].any * usual.uncovered
        part = _part(brings, brings, usual.made, entry.room - 1)
        level = self.draft.costs.table(USUAL_UNREAD * requests)[USUAL_UNREAD * requests] / requests + step.row
        return brings > (read * part + _LEVEL * level) * step.tokens / step.seconds()


def _part(gain: float, usual: float, made: float, room: int) -> float:
    """Return this step's part of all tokens that a draft is expected to yield for a text it has read.

    It yields `gain` tokens now and `usual` tokens in each later step, which has `made` tokens without it. The
    number of later steps follows from the `room` for tokens; the last token needs no guess.
    """
    later = usual * max(0.0, room - 1 - made - gain) / (made + usual)
    return gain / (gain + later) if gain else 0.0
