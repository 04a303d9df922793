"""Guard: keeps an engine from being slower than it is without speculation.

Speculation has an allowance of seconds it may lose (allowance.py). Each step with guesses is charged the
seconds that they took, and credited the seconds that they saved, in plain steps. A plain step has no guesses;
its time is the cost model's time of its pass, times a multiple that is measured in occasional plain steps. A
step longer than 33 plain ones is taken for a pause of the machine.

If a pass takes seconds because it waits for its weights, plain steps are too expensive to run for
measurement. The cost model gives their time (`known`): the maximum of loading weights and computing,
corrected by every pass. The time of a plain step is then that of its pass and of the other stages of recent
steps. Guesses are charged their own time and the cost model's time of their rows, so that a disturbance of
the disk is not charged to them.

A draft may then hold memory that layers of the target could use (models/draft_memory.py). Plain steps are
those of a target whose layers use it: a step with guesses is charged the difference. Once speculation was off
in 128 steps, and in more than it was on, the layers get the memory, and the draft guesses no more.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Final, NamedTuple

from specinfer.models.draft_memory import DraftMemory
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.decision import GUARD, PLAIN
from specinfer.speculate.policy.allowance import DEFAULT_TOLERANCE, KNOWN_COST_TOLERANCE, Allowance
from specinfer.speculate.policy.drafting import USUAL_UNREAD
from specinfer.speculate.policy.policy import LevelPass
from specinfer.speculate.speculator import LevelSpeculator, Outcome

_SLOWEST: Final = 8.0  # largest slowdown that is attributed to other load on the machine

PLAIN_FIRST: Final = 5  # plain steps of a batch size before speculation is on there
_PLAIN_EVERY: Final = 200  # later, one step in this number is plain
_PLAIN_SOON: Final = 8  # likewise, while the time of passes seems changed
_CHANGED: Final = 0.1  # relative change of the time of passes
_FEW: Final = 3  # plain steps needed after such a change
_GIVEN_UP: Final = 128  # steps without guesses before layers get a draft's memory
KEPT: Final = 5  # recent multiples whose median is used

# Stages of a step (engine/steps.py): those of the target's pass, and those of speculators.
TARGET_STAGES: Final = ("target_forward", "verify")
GUESSING_STAGES: Final = ("propose", "observe")


class SelfDraft(NamedTuple):
    """A draft whose memory layers of the target may get."""

    speculator: LevelSpeculator
    memory: DraftMemory
    layers: CostCurve  # the target's, when its layers have the memory


@dataclass(slots=True)
class PlainSteps:
    """Recent plain steps of one class of batch sizes: their seconds as multiples of the cost model's.

    Passes may seem slower or faster than at these steps. Then either the machine has changed, and the
    multiple is the same, or only passes with guesses have, and the model is wrong about plain ones. So some
    steps are soon plain again, and their multiples replace the others.
    """

    multiples: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0  # steps
    since: int = 0  # steps since the last plain one
    slowness: float = 1.0  # estimated time of passes relative to the curve, at the last plain step

    def due(self, slowness: float) -> bool:
        """Return whether a step should be plain, because the measurements do not suffice."""
        few = len(self.multiples) < _FEW or self._changed(slowness)
        return self.count < PLAIN_FIRST or self.since >= (_PLAIN_SOON if few else _PLAIN_EVERY)

    def learn(self, slowness: float, multiple: float) -> None:
        """Count a plain step, and record its multiple if it is a positive number."""
        self.count, self.since = self.count + 1, 0
        if self._changed(slowness):
            self.multiples.clear()
        if 0 < multiple < math.inf:
            self.slowness = slowness
            self.multiples.append(multiple)

    def _changed(self, slowness: float) -> bool:
        return abs(slowness / self.slowness - 1) > _CHANGED


class Guard:
    """Decides for each step whether speculation is on, and learns from the step's seconds.

    It also corrects the cost models of the policy (runtime/cost_model.py). With `measured=False` the seconds
    of steps come from the cost models instead of a clock. With `known` the target's cost model gives the time
    of plain steps, and none is run for measurement.
    """

    def __init__(
        self,
        target: CostModel,
        drafts: Mapping[str, CostModel],
        *,
        measured: bool = True,
        known: bool = False,
        self_draft: SelfDraft | None = None,
    ) -> None:
        """Make a guard that starts with the full allowance; `self_draft` needs `known`."""
        self._self_draft = self_draft
        self._target, self._drafts, self._measured, self._known = target, dict(drafts), measured, known
        self.allowance = Allowance(KNOWN_COST_TOLERANCE if known else DEFAULT_TOLERANCE)
        self._overheads = deque[float](maxlen=KEPT)  # seconds of recent steps outside passes and guesses
        # By the size of the batch, in powers of two.
        self.plain_steps = defaultdict[int, PlainSteps](PlainSteps)
        self.off_steps = self._on_steps = 0  # steps in which speculation was off, and on
        self._turn = 0  # counter that selects the draft's pass to learn from
        self._names: frozenset[str] = frozenset()  # ids of the last step's requests
        self.nodes = 0  # verified guesses of the step; set once they are chosen

    @property
    def factors(self) -> dict[str, float]:
        """Time of each model's passes relative to its curve; readable from any thread."""
        return {name: model.factor for name, model in {"target": self._target, **self._drafts}.items()}

    @property
    def overhead(self) -> float:
        """Seconds of recent steps outside passes and guesses."""
        return median_low(self._overheads) if self._overheads else 0.0

    def begin(self, names: Collection[str], requests: int, rows: int, own_size: bool) -> str | None:
        """Start a step; returns why speculation is off for it, or None if it is on.

        Args:
            names: the ids of all its requests.
            requests: number of requests with a tree.
            rows: rows of the target without guesses.
            own_size: True if a request has a size of its own.
        """
        self._requests, self._rows, self.nodes, self._own_size = requests, rows, 0, own_size
        self._prompts = rows > requests  # True if there are prefill rows
        # True if the step, kept plain, measures the time of plain steps.
        self._undisturbed = requests > 0 and not self._prompts and not own_size
        before, self._names = self._names, frozenset(names)
        if not (self.allowance.guessing or own_size) and self.off_steps >= max(_GIVEN_UP, self._on_steps):
            self._give_to_layers()
        self._pass = self._target.expected(max(1, requests))  # seconds without guesses and prompts
        self._slowness = self._target.slowness(max(1, requests))  # the same, relative to the curve
        self._memory_cost = self._memory_cost_of(max(1, rows))
        # Seconds of a plain step without prompts.
        if self._known:
            self._plain = self._pass - self._memory_cost_of(max(1, requests)) + self.overhead
        else:
            self._plain = self._multiple(requests) * self._pass
        allowed = self.allowance.allows(requests, self._plain, new=not self._names <= before)
        self._alike = self.plain_steps[requests.bit_length()]
        measures = not self._known and self._undisturbed and self._alike.due(self._slowness)
        # A measurement needs settled costs.
        self.off_reason = GUARD if not allowed else PLAIN if measures and self._target.settled else None
        self.off_steps += self.off_reason is not None
        self._on_steps += self.off_reason is None
        return self.off_reason

    def _give_to_layers(self) -> None:
        draft = self._self_draft
        if draft is not None and draft.memory.layers_may_use:
            draft.speculator.retired = True
            if draft.memory.give_to_layers():
                self._target.follow(draft.layers)
            self.allowance.seconds -= draft.memory.seconds

    def _memory_cost_of(self, rows: int) -> float:
        """Return the additional seconds of a pass of `rows` rows because the draft holds memory of layers."""
        draft = self._self_draft
        if draft is None or not draft.memory.layers_may_use:
            return 0.0
        return max(0.0, self._target.expected(rows) - self._target.expected_by(draft.layers, rows))

    def observe(
        self, outcomes: Sequence[Outcome], stages: Mapping[str, float], passes: Sequence[LevelPass]
    ) -> None:
        """Learn the time of passes, and count the seconds that the step has won or lost."""
        if self._measured:
            seconds = sum(stages.values())
            guessing = sum([stages.get(stage, 0.0) for stage in GUESSING_STAGES])
            if not self._prompts:
                self._overheads.append(seconds - guessing - sum([stages.get(s, 0.0) for s in TARGET_STAGES]))
                self._plain *= self._learn(stages, passes)
        else:
            known = [one for one in passes if one.speculator in self._drafts and one.rows > 0]
            passes = [replace(one, seconds=self._drafts[one.speculator].expected(one.rows)) for one in known]
            guessing = sum([one.seconds for one in passes])
            seconds = self._pass + self._seconds_of_nodes() + guessing
        if self.off_reason is not None:
            self.allowance.count_plain(seconds)
            if self._undisturbed:
                self._alike.learn(self._slowness, seconds / self._pass)
            return
        self._alike.since += 1
        if self._own_size:
            return
        tokens = [len(outcome.committed) for outcome in outcomes if outcome.committed]
        saved = self._plain * (sum(tokens) - len(tokens)) / max(1, len(tokens))
        reading = sum([one.seconds for one in passes if self._reads(one)])
        # Guesses are charged their own time, or the difference from a plain step. Prompts take their time
        # without guesses, too, as does a step that got no guesses.
        own_time = self._known or not self._measured or self._prompts or not (self.nodes or passes)
        spent = self._seconds_of_nodes() + guessing if own_time else seconds - self._plain
        spent += self._memory_cost
        if self._prompts:
            reading += self._memory_cost
        self.allowance.count_guessing(seconds, self._plain, spent - reading, saved, reading)

    def _multiple(self, requests: int) -> float:
        """Return the multiple for this class of batch sizes, or of the nearest measured one, else 1.

        It is the lower median of two, as a disturbance only makes a step longer.
        """
        wanted = requests.bit_length()
        seen = {size: plain.multiples for size, plain in self.plain_steps.items() if plain.multiples}
        return median_low(seen[min(seen, key=lambda size: abs(size - wanted))]) if seen else 1.0

    def _reads(self, one: LevelPass) -> bool:
        """Return whether a draft's pass read texts, beyond the tokens that are read in every step."""
        return one.level == 0 and one.rows > USUAL_UNREAD * max(1, self._requests)

    def _seconds_of_nodes(self) -> float:
        """Return the additional seconds of the target's pass for the verified guesses."""
        return self._target.expected(self._rows + self.nodes) - self._target.expected(self._rows)

    def _learn(self, stages: Mapping[str, float], passes: Sequence[LevelPass]) -> float:
        """Learn the time of the passes of a step without prompts; returns the machine's present slowdown.

        That is the slowdown, relative to the expected time, on which the target's pass and a draft's pass
        agree; 1 if they do not agree or there is only one. One of the drafts' passes is used in turn, as all
        would take too long; with `known` all are. None is used if a request has its own size, as heads
        may draw such trees level by level.
        """
        seconds = sum([stages.get(stage, 0.0) for stage in TARGET_STAGES])
        rows = self._rows + self.nodes
        of_target = seconds / self._target.expected(rows)
        self._target.learn(rows, seconds)
        if not passes or self._own_size:
            return 1.0
        self._turn += 1
        agreed = 1.0
        used = passes if self._known else [passes[self._turn % len(passes)]]
        for one in used:
            model = self._drafts.get(one.speculator)
            if model is not None and one.rows > 0 and not self._reads(one):
                of_draft = one.seconds / model.expected(one.rows)
                model.learn(one.rows, one.seconds)
                agreed = max(1.0, min(of_target, of_draft)) * min(1.0, max(of_target, of_draft))
        return 1.0 if self._known else min(_SLOWEST, max(1 / _SLOWEST, agreed))
