"""Keeps an engine from being slower than it is without speculation.

The one idea: speculation has an allowance of seconds it may lose (allowance.py). It is told of every step
the seconds that its guesses took, and those that they saved: of plain steps, as they would be now.

The latter are known from steps that are kept plain now and then, as a multiple of the cost model's seconds of
their pass. A step of more than 33 plain ones is taken for a pause of the machine.

Where a pass takes seconds, as it waits for its weights, plain steps are too dear to be bought, and the cost
model knows their time (`known`): the larger one of the weights' and the computation's, corrected by every
pass. Then no step is kept plain to be timed. A plain step takes the seconds of its pass, and those that steps
spend besides passes and guesses. A disturbance of the disk is no loss of guesses: those cost what they took
themselves, and what their rows add to the pass by the cost model.

There a draft may have memory that layers of the target could have (models/lent_memory.py). Plain steps are
those of a target that has it: a step in which the draft has it costs the difference, and where nobody may
guess the layers get the memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

from specinfer.models.lent_memory import LentMemory
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.decision import GUARD, PLAIN
from specinfer.speculate.policy.allowance import KNOWN, USUAL, Allowance
from specinfer.speculate.policy.drafting import USUAL_UNREAD
from specinfer.speculate.policy.policy import LevelPass
from specinfer.speculate.speculator import Outcome

_SLOWEST: Final = 8.0  # times; a step that is slower still is not slowed by a neighbour alone

PLAIN_FIRST: Final = 5  # plain steps of a batch size, before anybody guesses there
_PLAIN_EVERY: Final = 200  # steps, of which one is plain from then on
_PLAIN_SOON: Final = 8  # steps, of which one is plain where passes seem to have changed
_CHANGED: Final = 0.1  # relative
_FRESH: Final = 3  # plain steps since passes have changed, that are enough
KEPT: Final = 5  # multiples, of which the median counts

# Stages of a step (engine/metrics.py): those of a pass with its rows, and those of guesses besides.
TARGET_STAGES: Final = ("target_forward", "verify")
GUESSING_STAGES: Final = ("propose", "observe")


@dataclass(frozen=True, slots=True)
class GuardState:
    """The state of the guard and of the cost models."""

    off_steps: int  # in which nobody was let guess
    guessing: bool  # whether speculation is on
    factors: Mapping[str, float]  # by model: the time of its passes, relative to its curve


class Lending(NamedTuple):
    """The memory of a draft, and what passes of the target cost with it."""

    memory: LentMemory
    draft: CostCurve  # while the draft has it
    layers: CostCurve  # while layers of the target have it


@dataclass(slots=True)
class PlainSteps:
    """The plain steps of batches of about one size: their seconds, as multiples of the cost model's."""

    # How slow passes were thought to be, relative to the curve, and the multiple; the newest ones.
    seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0  # steps
    since: int = 0  # steps, since the last plain one
    asked_at: float = 0.0  # the slowness that `enough` and `multiple` are of; 0: of none
    enough: bool = False  # whether enough were seen since passes have been as slow
    multiple: float = 1.0

    def look_up(self, slowness: float) -> PlainSteps:
        """This, with `enough` and `multiple` of passes as slow as that; at least one step must be seen.

        When passes seem to be slower or quicker than at the last plain steps, either the machine is, and the
        multiple is the same, or passes with guesses are, and the cost model is wrong about others. Until a
        few plain steps tell, the least multiple that it may be counts.
        """
        if self.asked_at != slowness:  # it stays the same for steps, and is asked in every one
            last = takewhile(lambda seen: abs(slowness / seen[0] - 1) <= _CHANGED, reversed(self.seen))
            fresh = [multiple for _, multiple in last]
            known = _median([multiple for _, multiple in self.seen])
            self.enough = len(fresh) >= _FRESH
            self.multiple = _median(fresh) if self.enough else min([known, *fresh])
            self.asked_at = slowness
        return self

    def due(self, slowness: float) -> bool:
        """Whether a step should be plain, as too little is known of such steps."""
        if self.count < PLAIN_FIRST or self.since >= _PLAIN_EVERY:
            return True
        return self.since >= _PLAIN_SOON and bool(self.seen) and not self.look_up(slowness).enough

    def learn(self, slowness: float, multiple: float) -> None:
        """Count a plain step; a multiple that is no positive number is no use, and the step counts."""
        self.count, self.since = self.count + 1, 0
        if 0 < multiple < math.inf:
            self.seen.append((slowness, multiple))
            self.asked_at = 0.0


class Guard:
    """Decides of each step whether anybody may guess, and learns from its seconds.

    It corrects the costs that the policy decides by, too (runtime/cost_model.py). With `measured=False` the
    seconds of steps are those of the costs themselves: no clock has a say. With `known` the target's costs
    are believed of plain steps, and none is run to be timed.
    """

    def __init__(
        self,
        target: CostModel,
        drafts: Mapping[str, CostModel],
        *,
        measured: bool = True,
        known: bool = False,
        lending: Lending | None = None,
    ) -> None:
        """`lending` is of targets whose costs are known."""
        self._lending = lending
        self._target, self._drafts, self._measured, self._known = target, dict(drafts), measured, known
        self._allowance = Allowance(KNOWN if known else USUAL)
        self._besides = deque[float](maxlen=KEPT)  # seconds of the last steps besides passes and guesses
        self.plain_steps: dict[int, PlainSteps] = {}  # by the size of the batch, in powers of two
        self._off_steps = 0
        self._turn = 0  # of the passes of drafts, which of them is learnt from
        # Of the step:
        self._names: frozenset[str] = frozenset()  # its requests
        self._requests = 0  # that have a tree
        self._rows = 0  # of the target, without guesses
        self._nodes = 0  # guesses that are verified
        self._wishes = False  # a request has a size of its own
        self._held: str | None = None  # why nobody may guess
        self.lacks_draft = False  # nobody at all: the draft could not be brought back
        self._pass = 0.0  # seconds of a pass without guesses and prompts
        self._slowness = 1.0  # of such a pass, relative to the curve
        self._plain = 0.0  # seconds of a step without guesses and prompts
        self._rent = 0.0  # seconds by which the pass takes longer as a draft has memory of layers
        self._fetched = False  # the draft was brought back for it

    def state(self) -> GuardState:
        """Its state; may be asked by any thread."""
        models = {"target": self._target, **self._drafts}
        factors = {name: model.factor for name, model in models.items()}
        return GuardState(self._off_steps, self._allowance.guessing, factors)

    @property
    def allowance(self) -> float:
        """The seconds that speculation may lose from now on."""
        return self._allowance.seconds

    @property
    def besides_pass(self) -> float:
        """Seconds of a plain step besides its pass."""
        return _median(self._besides) if self._known and self._besides else max(0.0, self._plain - self._pass)

    def begin(self, names: Collection[str], requests: int, rows: int, wishes: bool) -> str | None:
        """Begin a step; why nobody may guess in it, None where they may.

        Args:
            names: the ids of all its requests.
            requests: those that have a tree.
            rows: of the target, without guesses.
            wishes: one of the requests has a size of its own.
        """
        self._requests, self._rows, self._nodes, self._wishes = requests, rows, 0, wishes
        known = self._names
        self._names = frozenset(names)
        self._fetched = False
        self._pass = self._target.expected(max(1, requests))
        self._rent = self._rent_of(max(1, requests))
        self._slowness = self._target.slowness(max(1, requests))
        if self._known:
            self._plain = self._pass - self._rent + (_median(self._besides) if self._besides else 0.0)
        else:
            self._plain = self._multiple(requests) * self._pass
        allowed = self._allowance.allows(requests, self._plain, new=not self._names <= known)
        anchor = not self._known and self._undisturbed and self._of_size(requests).due(self._slowness)
        anchor = anchor and self._target.settled  # or the step would be compared with earlier ones
        self._held = GUARD if not allowed else PLAIN if anchor else None
        if self._lending is not None:
            self._lend(self._lending)
        self._off_steps += self._held is not None
        return self._held

    def _lend(self, lending: Lending) -> None:
        """Give the draft's memory to whoever may use it in this step."""
        memory, self.lacks_draft = lending.memory, False
        if self._held is not None and not self._wishes:
            if memory.can_be_lent and memory.holder != "layers":
                memory.lend()
                self._allowance.charge(memory.seconds)
        elif memory.holder != "draft":
            self._fetched = True
            if not memory.take_back():
                self._held, self.lacks_draft = GUARD, True
        self._target.follow(lending.layers if memory.holder == "layers" else lending.draft)
        self._rent = self._rent_of(max(1, self._rows))

    def _rent_of(self, rows: int) -> float:
        """Seconds by which a pass of so many rows takes longer as a draft has memory of layers."""
        lending = self._lending
        if lending is None or lending.memory.holder == "layers" or not lending.memory.can_be_lent:
            return 0.0
        return max(0.0, self._target.expected(rows) - self._target.expected_by(lending.layers, rows))

    def chosen(self, nodes: int) -> None:
        """Note how many guesses are verified in the step."""
        self._nodes = nodes

    def observe(
        self, outcomes: Sequence[Outcome], stages: Mapping[str, float], passes: Sequence[LevelPass]
    ) -> None:
        """Learn the time of passes; count the seconds that the step won and lost."""
        guesses, reading, guessing = 0.0, 0.0, 0.0
        if self._measured:
            seconds = sum(stages.values())
            guessing = sum([stages.get(stage, 0.0) for stage in GUESSING_STAGES])
            if not self._prompts:
                self._besides.append(seconds - guessing - sum([stages.get(s, 0.0) for s in TARGET_STAGES]))
                self._plain *= self._learn(stages, passes)
        else:
            guesses, reading = self._seconds_by_costs(passes)
            if self._lending is not None and self._fetched:
                guesses += self._lending.memory.seconds
            seconds = self._pass + guesses
        if self._held is not None:
            self._allowance.held(seconds)
            if self._undisturbed:
                self._of_size(self._requests).learn(self._slowness, seconds / self._pass)
            return
        self._of_size(self._requests).since += 1
        if self._wishes:
            return
        tokens = [len(outcome.committed) for outcome in outcomes if outcome.committed]
        saved = self._plain * (sum(tokens) - len(tokens)) / max(1, len(tokens))
        spent = guesses
        if self._measured:
            reading = sum([one.seconds for one in passes if self._reads(one)])
            spent = seconds - self._plain
            if self._known or self._prompts or not (self._nodes or passes):
                # The time of prompts would be taken without guesses, too; so is all of a step that got none.
                spent = self._seconds_of_nodes() + guessing
        spent += self._rent
        if self._prompts:
            reading += self._rent
        self._allowance.guessed(seconds, self._plain, spent - reading, saved, reading)

    @property
    def _prompts(self) -> bool:
        """Whether prompts are read in the step."""
        return self._rows > self._requests

    @property
    def _undisturbed(self) -> bool:
        """Whether the step, kept plain, shows the time of plain steps."""
        return self._requests > 0 and not self._prompts and not self._wishes

    def _of_size(self, requests: int) -> PlainSteps:
        return self.plain_steps.setdefault(requests.bit_length(), PlainSteps())

    def _multiple(self, requests: int) -> float:
        """The multiple for batches of about this size, or of the nearest size that was seen; at first 1."""
        wanted = requests.bit_length()
        seen = [size for size, plain in self.plain_steps.items() if plain.seen]
        if not seen:
            return 1.0
        nearest = min(seen, key=lambda size: abs(size - wanted))
        return self.plain_steps[nearest].look_up(self._slowness).multiple

    def _reads(self, one: LevelPass) -> bool:
        """Whether a pass of a draft read texts, besides the tokens that are read in every step."""
        return one.level == 0 and one.rows > USUAL_UNREAD * max(1, self._requests)

    def _seconds_by_costs(self, passes: Sequence[LevelPass]) -> tuple[float, float]:
        """Seconds that the step spent on guesses by the costs, and of these on reading."""
        guesses, reading = self._seconds_of_nodes(), 0.0
        for one in passes:
            if (model := self._drafts.get(one.speculator)) is not None and one.rows > 0:
                seconds = model.expected(one.rows)
                guesses += seconds
                reading += seconds if self._reads(one) else 0.0
        return guesses, reading

    def _seconds_of_nodes(self) -> float:
        """Seconds that the target's pass takes longer for the guesses of the step."""
        if not self._nodes:
            return 0.0
        return self._target.expected(self._rows + self._nodes) - self._target.expected(self._rows)

    def _learn(self, stages: Mapping[str, float], passes: Sequence[LevelPass]) -> float:
        """Learn the time of the passes of a step without prompts; how slow it shows the machine to be.

        That is the slowness that the target's pass and a draft's agree on, relative to the expected; 1 where
        they do not, or there is but one. Of the passes of drafts one counts, in turn: all would take too
        long, but where plain steps are known, of seconds each. None counts where a request has a size of its
        own, as heads may draw such trees level by level.
        """
        seconds = sum([stages.get(stage, 0.0) for stage in TARGET_STAGES])
        rows = self._rows + self._nodes
        of_target = seconds / self._target.expected(rows)
        self._target.learn(rows, seconds)
        if not passes or self._wishes:
            return 1.0
        if self._known:
            for one in passes:
                if one.speculator in self._drafts and not self._reads(one):
                    self._drafts[one.speculator].learn(one.rows, one.seconds)
            return 1.0
        self._turn += 1
        one = passes[self._turn % len(passes)]
        model = self._drafts.get(one.speculator)
        if model is None or one.rows < 1 or self._reads(one):
            return 1.0
        of_draft = one.seconds / model.expected(one.rows)
        model.learn(one.rows, one.seconds)
        agreed = max(1.0, min(of_target, of_draft)) * min(1.0, max(of_target, of_draft))
        return min(_SLOWEST, max(1 / _SLOWEST, agreed))


def _median(values: Sequence[float]) -> float:
    """The lower one of two: a disturbance only makes a step longer."""
    return sorted(values)[(len(values) - 1) // 2]
