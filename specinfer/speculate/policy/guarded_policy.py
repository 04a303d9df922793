"""A policy that may not make the engine slower than it is without speculation.

It asks another policy as long as the guard allows it (guard.py), and in other steps leaves nobody to guess,
but for requests that ask for a size of their own. It knows what steps took: so it also corrects the costs the
other policy decides by (runtime/cost_model.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specinfer.config import SpeculationConfig
from specinfer.kernels.library import Library
from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.decision import Appraisal, Why
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.estimator import Estimates, Estimator
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.native_knowledge import NativeKnowledge
from specinfer.speculate.policy.native_weighing import NativeWeighing
from specinfer.speculate.policy.plain_steps import PlainSteps
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.speculate.policy.policy_memory import Learned
from specinfer.speculate.policy.speculation_policy import SpeculationPolicy, StepReport, has_own_size
from specinfer.speculate.policy.trusted_policy import TrustedPolicy
from specinfer.speculate.policy.weighing import Weighing
from specinfer.tree import TokenTree

_LOG = logging.getLogger(__name__)

# Stages of a step (engine/steps.py): what a pass takes with its rows, and what guesses take besides.
TARGET_STAGES: Final = ("target_forward", "verify")
GUESSING_STAGES: Final = ("propose", "observe")
_USUAL_UNREAD: Final = 2  # tokens of each text that a draft reads in every step; more is reading
_BLIND: Final = 0.5  # plain steps that a step is charged at least where the clock was no use
_SLOWEST: Final = 8.0  # times; what a step takes beyond that is no neighbour's
_NOBODY: Final = ()


@dataclass(frozen=True, slots=True)
class GuardState:
    """What the guard and the cost models have come to."""

    off_steps: int  # in which nobody was let guess
    guessing: bool  # whether speculation is on
    factors: Mapping[str, float]  # by model: what its passes take, of what its curve says


class GuardedPolicy:
    """A SpeculationPolicy around `policy`, which decides by `target` and `drafts`.

    With `measured=False` the seconds of steps are those of the costs themselves: no clock has a say in what
    is guessed.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        target: CostModel,
        drafts: Mapping[str, CostModel],
        *,
        measured: bool = True,
    ) -> None:
        self._policy = policy
        self._target = target
        self._drafts = dict(drafts)
        self._models = (target, *drafts.values())
        self._measured = measured
        self._guard = Guard()
        self._plain_steps = PlainSteps()
        self._off_steps = 0
        self._turn = 0  # whose pass is learnt from
        self._blind = False  # a step had no usable seconds, which was logged
        self._names: frozenset[str] = frozenset()  # of the requests in the step
        self._requests = 0  # that have a tree in the step
        self._rows = 0  # of the target in the step, without guesses
        self._nodes = 0  # that are guesses, of the trees of the step
        self._most_nodes: list[int] = []  # of each of them, the root included
        self._prompts = False  # are read in the step
        self._wishes = False  # a request has a size of its own
        self._held: Why | None = None  # why nobody may guess in the step
        self._pass = 0.0  # seconds of a pass without guesses and prompts
        self._slowness = 1.0  # of such a pass, as the cost model has it
        self._plain = 0.0  # seconds of a step without guesses and prompts

    def state(self) -> GuardState:
        """What it has come to; may be asked by any thread."""
        models = {"target": self._target, **self._drafts}
        factors = {name: model.factor for name, model in models.items()}
        return GuardState(self._off_steps, self._guard.guessing, factors)

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Decide whether anybody may guess; if not, the plan names nobody who may, but for own sizes."""
        entries = plan.entries
        most_nodes = list[int]()
        rows = context = 0
        wishes = False
        for entry in entries:  # one loop: this is asked in every step
            rows += entry.end - entry.start
            context += entry.end
            if entry.max_nodes > 0:
                most_nodes.append(entry.max_nodes)
                wishes = wishes or has_own_size(entry)
        self._requests = requests = len(most_nodes)
        self._rows, self._nodes, self._most_nodes = rows, 0, most_nodes
        self._prompts, self._wishes = rows > requests, wishes
        for model in self._models:
            model.begin(context / max(1, len(entries)))
        names = frozenset([entry.request.request_id for entry in entries])
        new, self._names = not names <= self._names, names
        self._pass = self._target.expected(max(1, requests))
        self._slowness = self._target.slowness(max(1, requests))
        self._plain = self._plain_steps.multiple(requests, self._slowness) * self._pass
        allowed = self._guard.allows(requests, self._plain, new=new)
        anchor = self._undisturbed and self._plain_steps.due(requests, self._slowness)
        anchor = anchor and self._target.settled  # or the step would be compared with what was
        self._held = Why.GUARD if not allowed else Why.PLAIN if anchor else None
        if self._held:
            self._off_steps += 1
            plan = StepPlan(tuple(map(_without_speculators, entries)))
        return self._policy.begin_step(plan)

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """As the policy says, but for a text it stands far behind in: what that takes must be affordable."""
        starts = self._policy.worth_starting(speculator, entries, unread, guessed)
        model = self._drafts.get(speculator)
        late = [
            (left, i)
            for i, (entry, left) in enumerate(zip(entries, unread, strict=True))
            if left > entry.end - entry.start + _USUAL_UNREAD and starts[i] and not has_own_size(entry)
        ]
        if model is None or not late:
            return starts
        affordable = self._guard.allowance
        for left, i in sorted(late):
            affordable -= model.expected(left)
            starts[i] = affordable >= 0
        return starts

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """As the policy says."""
        return self._policy.worth_deepening(speculator, entries, trees, ends)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """As the policy says."""
        chosen = self._policy.choose_nodes(trees)
        most = self._most_nodes  # what is beyond is cut by the ensemble
        self._nodes = sum(min(tree.num_nodes, n) - 1 for tree, n in zip(chosen, most, strict=True))
        return chosen

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        """As the policy does; the step takes what plain ones take besides their passes, too."""
        found = self._policy.appraise(trees)
        if found is None:
            return None
        return replace(found, seconds=found.seconds + self._plain - self._pass, nobody=self._held)

    def observe(self, report: StepReport) -> None:
        """Let the policy learn; learn what passes take; tell the guard what the step won and lost."""
        self._policy.observe(report)
        if not report.seconds:  # of requests that ended outside of a step
            return
        seconds, guesses, reading = 0.0, 0.0, 0.0
        if self._measured:
            seconds = self._usable(report)
        if seconds and not self._prompts:
            self._plain *= self._learn(report)
        if not seconds:
            guesses, reading = self._seconds_by_costs(report)
        if not self._measured:
            seconds = self._pass + guesses
        if self._held:
            self._guard.held(seconds)
            if self._undisturbed:
                self._plain_steps.learn(self._requests, self._slowness, seconds / self._pass)
            return
        self._plain_steps.guessed(self._requests)
        if self._wishes:
            return
        tokens = [len(outcome.committed) for outcome in report.outcomes if outcome.committed]
        saved = self._plain * (sum(tokens) - len(tokens)) / max(1, len(tokens))
        if not self._measured:
            spent = guesses
        elif not seconds:
            spent, reading, saved = max(guesses, _BLIND * self._plain), 0.0, 0.0
        else:
            reading = sum(one.seconds for one in report.passes if self._reads(one.level, one.rows))
            spent = seconds - self._plain
            if self._prompts or not (self._nodes or report.passes):
                # What prompts take would be taken without guesses, too; so is all of a step that got none.
                spent = self._seconds_of_nodes()
                spent += sum(report.seconds.get(stage, 0.0) for stage in GUESSING_STAGES)
        self._guard.guessed(seconds, self._plain, spent - reading, saved, reading)

    @property
    def _undisturbed(self) -> bool:
        """Whether the step, kept plain, shows what plain steps take."""
        return self._requests > 0 and not self._prompts and not self._wishes

    def _reads(self, level: int, rows: int) -> bool:
        """Whether a pass of a draft read texts, besides what is read in every step."""
        return level == 0 and rows > _USUAL_UNREAD * max(1, self._requests)

    def _seconds_by_costs(self, report: StepReport) -> tuple[float, float]:
        """What the step spent on guesses by the costs, and of that on reading."""
        guesses, reading = self._seconds_of_nodes(), 0.0
        for one in report.passes:
            if (model := self._drafts.get(one.speculator)) is not None and one.rows > 0:
                seconds = model.expected(one.rows)
                guesses += seconds
                reading += seconds if self._reads(one.level, one.rows) else 0.0
        return guesses, reading

    def _seconds_of_nodes(self) -> float:
        """What the target's pass takes longer for the nodes of the step that are guesses."""
        if not self._nodes:
            return 0.0
        return self._target.expected(self._rows + self._nodes) - self._target.expected(self._rows)

    def _usable(self, report: StepReport) -> float:
        """The seconds of a step; 0 where the clock was no use, which is logged once."""
        told = [*report.seconds.values(), *[one.seconds for one in report.passes]]
        if min(told) >= 0 and max(told) < math.inf and not math.isnan(sum(told)):
            total = sum(report.seconds.values())
            if 0 < total < math.inf:
                return total
        if not self._blind:
            self._blind = True
            _LOG.warning(
                "the clock says that the stages of a step took %s; such steps count as slow ones, and "
                "speculation is off while there are many",
                {stage: float(seconds) for stage, seconds in report.seconds.items()},
            )
        return 0.0

    def _learn(self, report: StepReport) -> float:
        """Learn what the passes of a step without prompts took; how slow it shows the machine to be.

        That is what the target's pass and a draft's agree on, in times of what was expected; 1 where they do
        not, or there is but one. Of the passes of drafts one counts, in turn: all would take too long; none
        where a request has a size of its own, as heads of one pass may draw such trees level by level.
        """
        seconds = sum(report.seconds.get(stage, 0.0) for stage in TARGET_STAGES)
        rows, passes = self._rows + self._nodes, report.passes
        of_target = seconds / self._target.expected(rows)
        self._target.learn(rows, seconds)
        if not passes or self._wishes:
            return 1.0
        self._turn += 1
        one = passes[self._turn % len(passes)]
        model = self._drafts.get(one.speculator)
        if model is None or one.rows < 1 or self._reads(one.level, one.rows):
            return 1.0
        of_draft = one.seconds / model.expected(one.rows)
        model.learn(one.rows, one.seconds)
        agreed = max(1.0, min(of_target, of_draft)) * min(1.0, max(of_target, of_draft))
        return min(_SLOWEST, max(1 / _SLOWEST, agreed))


def sized_by_cost(
    target: CostCurve,
    drafts: Mapping[str, CostCurve],
    speculation: SpeculationConfig,
    *,
    measured: bool,
    library: Library | None = None,
    estimator: Estimates | None = None,
) -> tuple[GuardedPolicy, Learned]:
    """The policy of an engine whose tree_size is "cost", given what its models' passes cost.

    `estimator` says how likely guesses are. By default that is learnt anew, by counts alone where there is no
    draft, as a logistic takes more of such a step than it gains (docs/log.md), and guesses are weighed in
    `library` where there is one. Returns also the policy's parts that learn what guesses are worth.
    """
    costs = CostModel("target", target, learns=measured)
    of_drafts = {name: CostModel(name, curve, learns=measured) for name, curve in drafts.items()}
    shape, deepest = speculation.fixed_expansion, speculation.deepest
    depths = {name: DraftCosts(cost, shape, deepest) for name, cost in of_drafts.items()}
    if estimator is None and library is not None:
        knowledge = NativeKnowledge(logistics=bool(drafts))
        learned = Learned(knowledge, depths)
        weighing: Weighing = NativeWeighing(library, knowledge, depths)
    else:
        estimator = estimator or Estimator(logistics=bool(drafts))
        learned, weighing = Learned(estimator, depths), PlainWeighing(estimator, depths)
    policy = TrustedPolicy(CostPolicy(costs, depths, weighing), FixedPolicy.of(speculation))
    return GuardedPolicy(policy, costs, of_drafts, measured=measured), learned


def _without_speculators(entry: PlanEntry) -> PlanEntry:
    """The entry, with nobody who may guess for it unless it has a size of its own."""
    return entry if has_own_size(entry) else replace(entry, speculators=_NOBODY)
