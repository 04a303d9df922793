"""For which requests a draft starts: whose first level is worth its pass and the reading before it.

A draft reads what it has not seen of a text before it guesses, once for all steps that the text will have. So
each step bears a part of that, as large as the part that it has in what the draft will bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from specinfer.plan import PlanEntry
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.guesses import gain
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.tokens_per_second import how_many
from specinfer.speculate.policy.weighing import Expected, StepCosts

# Of all time so much goes at most into a draft where it does not seem worth it: it may be by now.
_CURIOSITY: Final = 0.01
# Of a level behind a prompt: what it will bring is more than usual in some steps, in which it starts.
_LEVEL: Final = 0.9
_MEMORY: Final = 0.97  # of a mean, at each value
_THOUGHT: Final = 3.0  # values, that nobody has seen
# What others leave of a first level where that is not known yet, by whether there is a prediction: who sends
# one thinks that it holds most of the answer.
_LEFT: Final = {False: 1.0, True: 0.3}
_MADE: Final = {False: 1.0, True: 8.0}  # tokens, likewise: what a step makes with others' guesses
_USUAL_UNREAD: Final = 2  # tokens a draft reads in every step: the root, and a last guess it has not run


@dataclass(slots=True)
class _Fading:
    """The mean of about the last 30 values; first it is what they are thought to be."""

    mean: float
    count: float = _THOUGHT

    def add(self, value: float) -> None:
        """One more value."""
        self.count = _MEMORY * self.count + 1
        self.mean += (value - self.mean) / self.count


class Guessed(NamedTuple):
    """The step as it would be without the draft."""

    costs: StepCosts
    expected: Expected
    numbers: Mapping[str, int]  # of its requests, by which `expected` knows them
    row: float  # seconds of another row of the target's, in a step in which no prompt is read


class DraftStarts:
    """Says so for one draft, and remembers what its first levels were needed for."""

    def __init__(self, draft: DraftCosts) -> None:
        self._draft = draft
        self._saved = 0.0  # seconds it may spend without seeming worth it
        # What others leave of its first level, of late, and the tokens that a step makes with theirs.
        self._left = {predicted: _Fading(left) for predicted, left in _LEFT.items()}
        self._made = {predicted: _Fading(made) for predicted, made in _MADE.items()}

    def which(self, entries: Sequence[PlanEntry], unread: Sequence[int], step: Guessed) -> list[bool]:
        """For which of these the first level makes the step faster, or will once their prompts are read."""
        costs, (tokens, nodes, *_) = step.costs, step.expected
        without = costs.seconds(nodes)
        reading = self._draft.reading(unread, _USUAL_UNREAD)
        growing = [i for i, entry in enumerate(entries) if entry.max_nodes > 1]
        starts = [False] * len(entries)
        if len(growing) < len(entries):
            pace, level = tokens / without, _LEVEL * self._level(len(entries), step.row)
            for i, (entry, read) in enumerate(zip(entries, reading, strict=True)):
                if entry.max_nodes <= 1:
                    starts[i] = self._reads(entry, read, pace, level)
        gains = dict[int, float]()
        shares = dict[int, float]()
        for i in growing:
            brings, part = self._gain(entries[i], step)
            if brings * without > reading[i] * part * tokens:
                gains[i], shares[i] = brings, reading[i] * part
        first = sorted(gains, key=gains.__getitem__, reverse=True)
        seconds, shared = list[float](), 0.0
        for more, taken in enumerate(self._draft.seconds(_USUAL_UNREAD, len(first))):
            shared += shares[first[more - 1]] if more else 0.0
            seconds.append(costs.seconds(nodes + more) + taken + shared)
        count = how_many(map(gains.__getitem__, first), tokens, seconds)
        for i in first[:count]:
            starts[i] = True
        self._saved += _CURIOSITY * seconds[count]
        # Of requests it does not start for nothing else is found out, whatever it does for others.
        if refused := [i for i in growing if not starts[i]]:
            least = min(refused, key=unread.__getitem__)
            if self._saved >= self._draft.alone(unread[least]):
                self._saved = 0.0
                starts[least] = True
        return starts

    def _gain(self, entry: PlanEntry, step: Guessed) -> tuple[float, float]:
        """The tokens that the level brings a request, and its part in all that the draft will bring it."""
        predicted = bool(entry.request.prediction)
        left_of_late, made_of_late = self._left[predicted], self._made[predicted]
        rate = self._rate(entry)
        number, expected = step.numbers[entry.request.request_id], step.expected
        left = expected.left[number]
        left_of_late.add(left)
        made_of_late.add(expected.made[number])
        brings = gain(left, rate, expected.price)
        return brings, _part(brings, rate.any * left_of_late.mean, made_of_late.mean, entry.room)

    def _reads(self, entry: PlanEntry, read: float, pace: float, level: float) -> bool:
        """Whether a prompt is read: what others will guess behind it is not known, so it is what is usual.

        `read` seconds take the reading, `level` each level that comes of it, in which the engine would make
        `pace` tokens a second without. It is of no use in a text that is read, for which no row is left, nor
        where no more than two tokens can follow: the first one has no guesses, and the last one needs none.
        """
        if entry.end - entry.start < 2 or entry.room < 3:
            return False
        predicted = bool(entry.request.prediction)
        usual = self._rate(entry).any * self._left[predicted].mean
        part = _part(usual, usual, self._made[predicted].mean, entry.room - 1)
        return usual > (read * part + level) * pace

    def _rate(self, entry: PlanEntry) -> LevelRate:
        """How likely first guesses are right for a request."""
        return self._draft.rate(0, entry.request.request_id, entry.request.params.temperature)

    def _level(self, requests: int, row: float) -> float:
        """Seconds of a level and the node it brings, for each of so many requests."""
        return self._draft.seconds(_USUAL_UNREAD, requests)[-1] / requests + row


def _part(gain: float, usual: float, made: float, room: int) -> float:
    """The part that a step has in all that a draft brings a text that it has read.

    `gain` tokens now, `usual` ones beside the `made` of each step behind it, of which there are as many as
    there is `room` for tokens; for the last token nobody guesses.
    """
    later = usual * max(0.0, room - 1 - made - gain) / (made + usual)
    return gain / (gain + later) if gain else 0.0
