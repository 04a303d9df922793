"""Policies that take the hazards of guesses from a predictor, from their own counts, or from the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from matching_length.places import LEVELS, Floats
from specinfer.plan import PlanEntry, StepPlan
from specinfer.replay.trace import Trace
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.guarded_policy import GuardedPolicy
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.tree import Draw, TokenTree


class GivenLevels(DraftCosts):
    """A draft's costs with hazards that are given; its own counts where none are."""

    given: Sequence[float] = ()

    def rates(self) -> Sequence[LevelRate]:
        counted = super().rates()
        return [LevelRate(hazard, 0.0) for hazard in self.given][: len(counted)] or counted

    def usual(self, level: int) -> LevelRate:
        rates = self.rates()
        return rates[min(level, len(rates) - 1)]

    def rate(self, level: int, request_id: str | None = None, temperature: float | None = None) -> LevelRate:
        return super().rate(level, None, None) if self.given else super().rate(level, request_id, temperature)


class ByHazards(CostPolicy):
    """The policy with hazards of somebody else, for one request at a time.

    With `ahead` a draft's depth is settled before it draws, as in the paper: the one with the most expected
    tokens per second. Else every level is weighed by what was drawn above it, as the policy does.
    """

    def __init__(
        self,
        trace: Trace,
        hazards: Sequence[Mapping[str, Floats]],
        *,
        ahead: bool,
        lookups: bool,
    ) -> None:
        """`hazards` are those of each text in the order they are played, [places, LEVELS] by speculator.

        `lookups` says whether guesses that cost nothing are hoped for by them, too.
        """
        target = CostModel("target", trace.curve, learns=False)
        expansion = trace.speculation.fixed_expansion
        self.models = {
            name: CostModel(name, draft.curve, learns=False) for name, draft in trace.drafts.items()
        }
        self.target = target
        self.steps = 0
        self._levels = {name: GivenLevels(model, expansion) for name, model in self.models.items()}
        self._given = GivenLookups(self._levels)
        super().__init__(target, self._levels, self._given)
        self._hazards = hazards
        self._ahead, self._lookups = ahead, lookups
        self._here: Mapping[str, Floats] = {}
        self._planned = 0  # levels of the draft that is being asked

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self.steps += 1
        self._here = {}
        for entry in plan.tree_entries:
            place = entry.end - len(entry.request.prompt_token_ids)
            of_text = self._hazards[int(entry.request.request_id)] if self._hazards else {}
            if place > 0:
                self._here = {name: values[place] for name, values in of_text.items()}
        self._given.hazards = self._here if self._lookups else {}
        for name, levels in self._levels.items():
            levels.given = self._here[name].tolist() if name in self._here else ()
        return super().begin_step(plan)

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        before = self._costs
        starts = super().worth_starting(speculator, entries, unread, guessed)
        if self._ahead and entries[0].max_nodes > 1:
            self._costs = before
            self._planned = self._depth(speculator, entries[0], unread[0])
            starts = [self._planned > 0]
            self._spend(self._drafts[speculator].alone(1) if self._planned else 0.0)
        return starts

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        before = self._costs
        deeper = super().worth_deepening(speculator, entries, trees, ends)
        if self._ahead:
            goes_on = max(trees[0].depths()) < self._planned
            deeper = [ends[0] if goes_on else ()]
            self._costs = before
            self._spend(self._drafts[speculator].alone(len(ends[0])) if goes_on else 0.0)
        return deeper

    def _depth(self, speculator: str, entry: PlanEntry, unread: int) -> int:
        """The number of levels with the most expected tokens per second, nothing being drawn yet."""
        draft = self._drafts[speculator]
        guesses, costs = self._given.guesses, self._costs
        gain = guesses[self._numbers[entry.request.request_id]].gain(0, draft.rate(0), 0.0)
        tokens, nodes = self._given.so_far(guesses, costs)
        seconds, best = 0.0, (tokens / costs.seconds(nodes), 0)
        rates = draft.rates()
        for level, rate in enumerate(rates):
            seconds += draft.alone(1 if level else max(2, unread))
            gain *= rate.any if level else 1.0
            tokens, nodes = tokens + gain, nodes + 1
            best = max(best, (tokens / (costs.seconds(nodes) + seconds), level + 1))
        return best[1]


class GivenLookups(PlainWeighing):
    """Counts, and hazards that are given of the guesses of others than these drafts, by speculator."""

    def __init__(self, drafts: Mapping[str, DraftCosts]) -> None:
        super().__init__(Estimator(logistics=False), drafts)
        self.hazards: Mapping[str, Floats] = {}
        self._levels = drafts

    def rates(self, number: int, draws: Sequence[Draw], num_nodes: int) -> list[float]:
        found = super().rates(number, draws, num_nodes)
        given = {name for name in self.hazards if name not in self._levels}
        if given:
            of_given(found, [draw for draw in draws if draw.speculator in given], self.hazards)
        return found


def of_given(rates: list[float], draws: Sequence[Draw], hazards: Mapping[str, Floats]) -> None:
    """Scale the rates of a speculator's draws below each node so that they sum to the level's hazard."""
    depths = {0: 0}
    groups: dict[tuple[int, str], list[int]] = {}
    for draw in sorted(draws, key=lambda one: one.node):
        depths[draw.node] = depths.get(draw.parent, 0) + 1
        groups.setdefault((draw.parent, draw.speculator), []).append(draw.node)
    for (parent, name), nodes in groups.items():
        level = min(depths.get(parent, 0), LEVELS - 1)
        hazard, before = float(hazards[name][level]), sum(rates[node] for node in nodes)
        if np.isnan(hazard) or before <= 0:
            continue
        for node in nodes:
            rates[node] = min(1.0, rates[node] * hazard / before)


def truth(hits: Floats) -> Floats:
    """Hazards of somebody who knows the text: 1 along a guess as far as it is right, 0 behind it."""
    return np.where(hits == 1, 0.999, 0.001).astype(np.float32)


def guarded(policy: ByHazards) -> GuardedPolicy:
    """As an engine has it with clock="curve"."""
    return GuardedPolicy(policy, policy.target, policy.models, measured=False)
