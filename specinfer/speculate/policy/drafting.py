"""When a draft's pass is worth its time: at its first level, at the next one, and for reading a text.

A draft reads the tokens of a text that it has not seen before it guesses, once for all steps that the text
will have. So each step bears a part of that, as large as its part in all that the draft will bring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.chances import Chances, DraftLevels, LevelRate
from specinfer.speculate.policy.choose import StepCosts, along_paths, how_many
from specinfer.tree import TokenTree
from specinfer.tree.expansion import Expansion
from specinfer.tree.merging import firm_nodes
from specinfer.tree.token_tree import child_of

# Of a level behind a prompt: it will bring more than usual in some steps, in which it starts.
_LEVEL: Final = 0.9
_MEMORY: Final = 0.97  # of a mean, at each value
_THOUGHT: Final = 3.0  # values, that nobody has seen
# How much of a first level others leave to a draft, where that is not known yet, by whether there is a
# prediction: a caller that sends one thinks that it holds most of the answer.
_LEFT: Final = {False: 1.0, True: 0.3}
_MADE: Final = {False: 1.0, True: 8.0}  # tokens that a step makes with others' guesses, likewise
_REFUSED: Final = 16  # steps in a row in which a draft did not seem worth it; then its counts and costs fade
_REFUSED_MEMORY: Final = 0.8  # the part that stays then: a draft that guesses nothing shows nothing new
_SUREST: Final = 0.99  # that a level is right; or its levels would be worth it for ever
USUAL_UNREAD: Final = 2  # tokens a draft reads in every step: the root, and a last guess it has not run


class PricedDraft(NamedTuple):
    """A draft whose passes have a price."""

    costs: CostModel
    expansion: Expansion  # of its trees of samples

    def width(self, level: int) -> int:
        """The samples that a node at this depth gets."""
        return self.expansion.widths[min(level, self.expansion.depth - 1)]

    def reading(self, unread: Sequence[int]) -> list[float]:
        """Seconds that each request with more than USUAL_UNREAD unread tokens adds to a pass for all."""
        if max(unread) <= USUAL_UNREAD:  # so it is in nearly every step
            return [0.0] * len(unread)
        together, expected = USUAL_UNREAD * len(unread), self.costs.expected
        without = expected(together)
        return [
            expected(together + left - USUAL_UNREAD) - without if left > USUAL_UNREAD else 0.0
            for left in unread
        ]


class Growing:
    """One request's guesses while a draft adds to them: `others` is the tree of all that came before it.

    A level is worth only the tokens that nobody else holds. The request may have `most` nodes, the root
    included, and has them if `all_stay`.
    """

    def __init__(self, others: TokenTree, chances: Chances, most: int, *, all_stay: bool) -> None:
        self._others, self._chances, self.all_stay = others, chances, all_stay
        self._rates = chances.node_rates(others)
        held = [0.0] * len(self._rates)
        for parent, rate in zip(others.parents[1:], self._rates[1:], strict=True):
            held[parent] += rate
        self.left = [max(0.0, 1.0 - of) for of in held]  # nobody holds the token behind each of them
        self._firm = firm_nodes(others)
        self._room = most - 1
        self._places = [0]  # of the draft's nodes among others', -1 where there is none
        self._probabilities = [1.0]  # of the draft's nodes to become text
        self._drawn = 0  # of its draws, that were seen
        # The probabilities of its samples, and of other nodes that nobody else holds.
        self._sampled, self._dropped = list[float](), list[float]()
        self._weigh()

    @property
    def samples(self) -> bool:
        """Whether the draft draws nodes that cannot be dropped."""
        return bool(self._sampled)

    def grow(self, tree: TokenTree) -> None:
        """Add the nodes that are new in the draft's tree."""
        draws = tree.draws[self._drawn :]
        self._drawn += len(draws)
        probabilities, places, others = self._probabilities, self._places, self._others
        for draw, rate in zip(draws, self._chances.rates(draws), strict=True):
            node, above = draw.node, places[draw.parent]
            if node < len(places):  # drawn before: samples may be the same token
                continue
            place = -1
            if above >= 0:
                found = child_of(others.token_ids, others.parents, above, tree.token_ids[node])
                place = -1 if found is None else found
            if place >= 0:
                rate = self._rates[place] = max(rate, self._rates[place])
            likely = rate * probabilities[draw.parent]
            places.append(place)
            probabilities.append(likely)
            if draw.rule.is_sampled:
                self._sampled.append(likely)
            elif place < 0:
                self._dropped.append(likely)
        self._weigh()

    def _weigh(self) -> None:
        """Weigh all nodes; where the draft agrees with others, their guesses behind it are likelier."""
        firm = self._firm
        self.known = along_paths(self._rates, self._others.parents)  # of others' nodes to become text
        self.nodes = len(firm) + len(self._sampled)  # that stay in any case
        self.tokens = sum([self.known[node] for node in firm]) + sum(self._sampled)  # that these bring
        loose = [p for node, p in enumerate(self.known) if node and node not in firm] + self._dropped
        loose.sort(reverse=True)
        self.loose = loose[: max(0, self._room - self.nodes)]  # the others that there is room for, best first

    def gain(self, end: int, rate: LevelRate, price: float) -> float:
        """The tokens that children of a node of the draft's tree bring; `rate` is of the level below it.

        The first child has a row of the target's; others are charged `price`. Samples are all verified, so
        their rows are counted by the caller.
        """
        place = self._places[end]
        arrives = self._probabilities[end] * (self.left[place] if place >= 0 else 1.0)
        return gain(arrives, rate, 0.0 if self.samples else price)


def gain(arrives: float, rate: LevelRate, price: float) -> float:
    """The tokens that a level brings behind a node that becomes text, and is left to it, so probably."""
    return arrives * rate.first + max(0.0, arrives * rate.other - price)


def useful_levels(best: float, rate: float, price: float) -> float:
    """The levels, one at least, that will be worth `price` tokens each.

    The first of them brings `best` tokens, each further one `rate` times those of the one above.
    """
    if best <= price or rate <= 0:
        return 1.0
    return 1.0 + math.log(price / best) / math.log(min(rate, _SUREST))


def best_of(gains: Sequence[float], most: int) -> list[float]:
    """The gains with 0 in place of all but the `most` largest, one at least; of equal ones the earlier."""
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    kept = frozenset(order[: max(1, most)])
    return [of if number in kept else 0.0 for number, of in enumerate(gains)]


def children_each(tree: TokenTree) -> float:
    """How many children the nodes of a tree have that have some, one at least."""
    return max(1.0, (tree.num_nodes - 1) / max(1, len(set(tree.parents)) - 1))


@dataclass(slots=True)
class _Fading:
    """The mean of about the last 30 values; first it is what they are thought to be."""

    mean: float
    count: float = _THOUGHT

    def add(self, value: float) -> None:
        """One more value."""
        self.count = _MEMORY * self.count + 1
        self.mean += (value - self.mean) / self.count


class Without(NamedTuple):
    """The step as it is expected without the draft."""

    costs: StepCosts
    tokens: float
    nodes: int  # below roots
    row: float  # seconds of another row of the target's, in a step in which no prompt is read


class DraftStarts:
    """Decides for which requests one draft starts: whose first level is worth its pass and the reading."""

    def __init__(self, draft: PricedDraft, levels: DraftLevels) -> None:
        self._draft = draft
        self._levels = levels
        # How much others leave of its first level, of late, and the tokens that a step makes with theirs.
        self._left = {predicted: _Fading(left) for predicted, left in _LEFT.items()}
        self._made = {predicted: _Fading(made) for predicted, made in _MADE.items()}
        self._refused = 0  # steps in a row

    def refused(self) -> None:
        """Note a step in which the draft could guess, and did not seem worth it."""
        self._refused += 1
        if self._refused == _REFUSED:
            self._refused = 0
            self._levels.fade(_REFUSED_MEMORY)
            self._draft.costs.fade(_REFUSED_MEMORY)

    def which(
        self,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        growing: Mapping[int, Growing],
        step: Without,
    ) -> list[bool]:
        """For which of these the first level makes the step faster, or will once their prompts are read.

        `growing` are others' guesses, by number, for those that may have more nodes than a root.
        """
        costs, tokens, nodes, _ = step
        without, price = costs.seconds(nodes), costs.price(tokens, nodes)
        reading = self._draft.reading(unread)
        starts = [False] * len(entries)
        gains, shares = dict[int, float](), dict[int, float]()
        drawing = [i for i, entry in enumerate(entries) if entry.max_nodes > 1]
        for i, entry in enumerate(entries):
            if entry.max_nodes <= 1:
                starts[i] = self._reads(entry, reading[i], len(entries), tokens / without, step.row)
        for i in drawing:
            brings, part = self._gain(entries[i], growing[i], price)
            if brings * without > reading[i] * part * tokens:
                gains[i], shares[i] = brings, reading[i] * part
        first = sorted(gains, key=gains.__getitem__, reverse=True)
        passes = self._draft.costs.table(USUAL_UNREAD * len(first))
        seconds, shared = list[float](), 0.0
        for more in range(len(first) + 1):
            shared += shares[first[more - 1]] if more else 0.0
            seconds.append(costs.seconds(nodes + more) + passes[USUAL_UNREAD * more] + shared)
        for i in first[: how_many([gains[i] for i in first], tokens, seconds)]:
            starts[i] = True
        if any(starts[i] for i in drawing):
            self._refused = 0
        return starts

    def _gain(self, entry: PlanEntry, guesses: Growing, price: float) -> tuple[float, float]:
        """The tokens that the level brings a request, and its part in all that the draft will bring it."""
        predicted = bool(entry.request.prediction)
        left_of_late, made_of_late = self._left[predicted], self._made[predicted]
        rate = self._rate(entry)
        left_of_late.add(guesses.left[0])
        made_of_late.add(sum([likely for likely in guesses.known if likely > price]))
        brings = gain(guesses.left[0], rate, price)
        return brings, _part(brings, rate.any * left_of_late.mean, made_of_late.mean, entry.room)

    def _reads(self, entry: PlanEntry, read: float, requests: int, pace: float, row: float) -> bool:
        """Whether a prompt is read: others' guesses behind it are not known, so they are taken as usual.

        `read` seconds take the reading; the engine would make `pace` tokens a second without. It is of no use
        in a text that is read, for which no row is left, nor where no more than two tokens can follow: the
        first one has no guesses, and the last one needs none.
        """
        if entry.end - entry.start < 2 or entry.room < 3:
            return False
        predicted = bool(entry.request.prediction)
        usual = self._rate(entry).any * self._left[predicted].mean
        part = _part(usual, usual, self._made[predicted].mean, entry.room - 1)
        level = self._draft.costs.table(USUAL_UNREAD * requests)[USUAL_UNREAD * requests] / requests + row
        return usual > (read * part + _LEVEL * level) * pace

    def _rate(self, entry: PlanEntry) -> LevelRate:
        """How likely first guesses are right for a request."""
        return self._levels.rates(entry.request.params.temperature)[0]


def _part(gain: float, usual: float, made: float, room: int) -> float:
    """The part that a step has in all that a draft brings a text that it has read.

    `gain` tokens now, `usual` ones beside the `made` of each step behind it, of which there are as many as
    there is `room` for tokens; for the last token nobody guesses.
    """
    later = usual * max(0.0, room - 1 - made - gain) / (made + usual)
    return gain / (gain + later) if gain else 0.0
