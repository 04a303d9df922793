"""Would a hedge over degrees of eagerness decide better than the policy alone?

    python benchmarks/policy_hedge.py --model TARGET --traces TRACE... --out RESULT.md

The policy hopes for guesses by counts that are corrected by how sure each guess is, and adds what raises
tokens per second. An arm is the same policy with all odds of its hopes multiplied: below 1 it drafts less and
verifies less, above 1 more. All arms learn the same. Played without a model, guard and all:

    arms         each for itself: what would have been the best fixed degree in hindsight
    best per text    the quickest arm at each text: what nobody can know, a bound on choosing by text
    hedge        every step each arm says what it would have done, and is credited with what that would
                 have brought: its tokens less its seconds at the rate of the last steps. Weights are
                 exponential in the credit, and a share of all is spread anew at each step (the fixed share
                 of Herbster and Warmuth); one arm drawn by weight decides. Of an arm more eager than that
                 one the rest is hoped for; so in one step of 16 the most eager one decides.
    hedge, quick     learns four times as fast, and explores nothing

Traces are files of kinds, kind-00, kind-01, ... Each is played for itself, then all in turns, then one kind
after the other (phases). All is paired on the same texts, with 95% intervals over texts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from policy_matching_length import ratio, seconds_of, workloads
from study import REQUIRED, Study, parser, row, run, settings_of

from specinfer.plan import PlanEntry, StepPlan
from specinfer.replay.replay import Part, counting_policy
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.runtime.cost_model import CostModel, PassCosts
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.guarded_policy import GuardedPolicy
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.speculate.speculator import LevelOutcome
from specinfer.tree import Draw, TokenTree
from specinfer.tree.expansion import Expansion
from specinfer.tree.prune import keep
from specinfer.tree.token_tree import next_nodes

ARMS: Final = (0.35, 0.6, 1.0, 1.7, 2.8)  # times the odds of what is hoped for; 1 is the policy
HEDGES: Final[dict[str, dict[str, Any]]] = {
    "hedge": {},
    "hedge, quick": {"rate": 1.0, "explored": 0},
}
SHARE: Final = 0.01  # of all weight is spread anew at each step
PRICE_STEPS: Final = 20  # that say what a second is worth


def main() -> None:
    options = parser(__doc__, model=REQUIRED)
    options.add_argument(
        "--traces", nargs="+", type=Path, required=True, metavar="TRACE", help="kind-00, ..."
    )
    args = options.parse_args()
    study = Study("hedge", args.out, settings_of(args))
    traces = {path.stem: read_trace(path) for path in args.traces}
    orders = workloads(traces)
    if "all in turns" in orders:
        orders["phases"] = [text for name, of in orders.items() if name != "all in turns" for text in of]
    for name, order in orders.items():
        if name not in study.cells:
            study.keep(name, played(order, traces))
            print(name, study.cells[name]["ratios"], flush=True)
    study.write(page(study.cells, args))


def played(order: Sequence[tuple[str, int]], traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Seconds of each text under each arm and the hedge, and their speed over the present policy's."""
    parts = [Part([(traces[name], number) for name, number in order])]
    first = traces[order[0][0]]
    present = seconds_of(parts, counting_policy(first, first.speculation))
    seconds = {f"odds x {odds:g}": seconds_of(parts, _alone(first, odds)) for odds in ARMS}
    best = [min(of_text) for of_text in zip(*seconds.values(), strict=True)]
    shares = dict[str, Any]()
    for name, options in HEDGES.items():
        hedge = Hedge(first, ARMS, **options)
        seconds[name] = seconds_of(parts, hedge.guarded(), inner=hedge)
        shares[name] = hedge.shares()
    return {
        "texts": len(order),
        "tokens": sum(len(traces[name].texts[number].output) for name, number in order),
        "present": sum(present),
        "shares": shares,
        "ratios": {
            **{name: ratio(present, each) for name, each in seconds.items()},
            "best per text": ratio(present, best),
        },
    }


def _alone(trace: Trace, odds: float) -> GuardedPolicy:
    """One arm, for itself."""
    hedge = Hedge(trace, (odds,))
    return hedge.guarded()


def scaled(rate: float, odds: float) -> float:
    """A probability whose odds are multiplied."""
    return odds * rate / (1 - rate + odds * rate) if rate < 1 else 1.0


class ScaledLevels(DraftCosts):
    """A draft's costs as an arm sees them: what all arms have counted, its odds multiplied."""

    def __init__(self, costs: PassCosts, expansion: Expansion, counted: DraftCosts, odds: float) -> None:
        super().__init__(costs, expansion)
        self._counted, self._odds = counted, odds

    def rate(self, level: int, request_id: str | None = None, temperature: float | None = None) -> LevelRate:
        counted = self._counted.rate(level, request_id, temperature)
        first, both = scaled(counted.first, self._odds), scaled(counted.any, self._odds)
        return LevelRate(first, both - first)

    def learn(self, seen: LevelOutcome, temperature: float | None = None) -> None:
        self._counted.learn(seen, temperature)

    def forget(self, request_id: str) -> None:
        self._counted.forget(request_id)


class ScaledWeighing(PlainWeighing):
    """Counts that all arms share, the odds of what is hoped for multiplied."""

    def __init__(self, counts: Estimator, drafts: Mapping[str, ScaledLevels], odds: float) -> None:
        super().__init__(counts, drafts)
        self._odds = odds

    def rates(self, number: int, draws: Sequence[Draw], num_nodes: int) -> list[float]:
        found = super().rates(number, draws, num_nodes)
        return found if self._odds == 1 else [scaled(rate, self._odds) for rate in found]


class Arm(CostPolicy):
    """The policy with the odds of its hopes multiplied, and what it would have done in this step."""

    def __init__(
        self, target: PassCosts, drafts: Mapping[str, ScaledLevels], counts: Estimator, odds: float
    ) -> None:
        """Of all arms that share `counts` one is told what came of guesses."""
        self.weighing = ScaledWeighing(counts, drafts, odds)
        super().__init__(target, drafts, self.weighing)
        self.odds = odds
        self.levels: dict[tuple[str, str], int] = {}  # of each draft and request, as it would have drawn
        self.drafting = 0.0  # seconds of the passes it would have made
        self.hoped = 0.0  # tokens of levels that nobody drew
        self._before = 0.0  # seconds spent before any draft is asked

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self.levels, self.drafting, self.hoped = {}, 0.0, 0.0
        plan = super().begin_step(plan)
        self._before = self._costs.spent
        return plan

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        # By what it would have drawn, whatever was.
        self._costs = self._costs._replace(spent=self._before + self.drafting)
        return super().choose_nodes(trees)

    def learn_from(self, trees: Sequence[TokenTree]) -> None:
        """Have these trees for what all have guessed."""
        self.weighing.trees = trees
        self._waiting = {n for n, tree in enumerate(trees) if tree.num_nodes > 1}

    def seconds(self, nodes: int) -> float:
        """Of the target's pass with so many nodes, and of its drafts."""
        return self.drafting + self._costs._replace(spent=0.0).seconds(nodes)

    def gain(self, speculator: str, entry: PlanEntry, end: int, level: int) -> float:
        """What it hopes of children of a node of the draft's tree, at this level."""
        request_id, costs = entry.request.request_id, self._costs
        guesses = self.weighing.guesses
        price = costs.price(*self.weighing.so_far(guesses, costs))
        rate = self._drafts[speculator].rate(level, request_id, entry.request.params.temperature)
        return guesses[self._numbers[request_id]].gain(end, rate, price)

    def passes(self, speculator: str, rows: int) -> float:
        return self._drafts[speculator].alone(rows)


@dataclass(slots=True)
class Weights:
    """Exponential weights with a fixed share."""

    logs: list[float]
    rate: float  # of learning, for credits of at most one token
    drawn: list[int] = field(default_factory=list)  # how often each arm decided

    def probabilities(self) -> list[float]:
        most = max(self.logs)
        raw = [math.exp(one - most) for one in self.logs]
        return [one / sum(raw) for one in raw]

    def learn(self, credits: Sequence[float]) -> None:
        self.logs = [log + self.rate * credit for log, credit in zip(self.logs, credits, strict=True)]
        count = len(self.logs)
        self.logs = [math.log((1 - SHARE) * p + SHARE / count) for p in self.probabilities()]


class Hedge:
    """A SpeculationPolicy in which one of several arms decides, drawn by what each would have brought."""

    def __init__(
        self, trace: Trace, odds: Sequence[float], *, rate: float = 0.25, explored: int = 16
    ) -> None:
        """`explored` steps have one in which the most eager arm decides; 0: none has."""
        self.target = CostModel("target", trace.curve, learns=False)
        self.models = {name: CostModel(name, of.curve, learns=False) for name, of in trace.drafts.items()}
        expansion = trace.speculation.fixed_expansion
        counted = {name: DraftCosts(model, expansion) for name, model in self.models.items()}
        counts = Estimator(logistics=False)
        self.arms = [
            Arm(
                self.target,
                {n: ScaledLevels(model, expansion, counted[n], one) for n, model in self.models.items()},
                counts,
                one,
            )
            for one in odds
        ]
        self.weights = Weights([0.0] * len(odds), rate, [0] * len(odds))
        self._explored = explored
        self.steps = 0
        self._rng = np.random.default_rng(0)
        self._neutral = min(self.arms, key=lambda arm: abs(math.log(arm.odds)))
        self._leader = self.arms[0]
        self._rest = sum(trace.stages.get(stage, 0.0) for stage in ("schedule", "verify", "commit"))
        self._tokens = self._seconds = 0.0  # of the last steps, fading
        self._entries: tuple[PlanEntry, ...] = ()
        self._verified: dict[str, list[TokenTree]] = {}  # by request, of each arm
        self._whole: dict[str, TokenTree] = {}

    def guarded(self) -> GuardedPolicy:
        """As an engine has it with clock="curve"."""
        return GuardedPolicy(self, self.target, self.models, measured=False)

    def shares(self) -> dict[str, float]:
        """How often each arm decided."""
        total = max(1, sum(self.weights.drawn))
        return {f"{arm.odds:g}": n / total for arm, n in zip(self.arms, self.weights.drawn, strict=True)}

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self.steps += 1
        which = int(self._rng.choice(len(self.arms), p=self.weights.probabilities()))
        if self._explored and self.steps % self._explored == 0:
            which = len(self.arms) - 1
        self.weights.drawn[which] += 1
        self._leader = self.arms[which]
        self._entries = plan.tree_entries
        for arm in self.arms:
            arm.begin_step(plan)
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        answers = {arm.odds: arm.worth_starting(speculator, entries, unread, guessed) for arm in self.arms}
        growing = [entry for entry in entries if entry.max_nodes > 1]
        roots = {odds: [(0,) if starts else () for starts in of] for odds, of in answers.items()}
        self._note(speculator, growing, 0, {odds: _by_name(entries, of) for odds, of in roots.items()})
        return answers[self._leader.odds]

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        level = max(trees[0].depths())
        answers = {arm.odds: arm.worth_deepening(speculator, entries, trees, ends) for arm in self.arms}
        self._note(speculator, entries, level, {odds: _by_name(entries, of) for odds, of in answers.items()})
        return answers[self._leader.odds]

    def _note(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        level: int,
        answers: Mapping[float, Mapping[str, Sequence[int]]],
    ) -> None:
        """Note below which nodes each arm would have gone on, by its odds and the requests' names."""
        leading = answers[self._leader.odds]
        for arm in self.arms:
            going = 0
            for entry in entries:
                name = entry.request.request_id
                key = (speculator, name)
                if not answers[arm.odds][name] or (level and arm.levels.get(key, 0) < level):
                    continue
                arm.levels[key] = level + 1
                going += len(answers[arm.odds][name])
                if not leading[name]:  # nobody will know: by what the policy itself hopes
                    arm.hoped += sum(
                        self._neutral.gain(speculator, entry, end, level) for end in answers[arm.odds][name]
                    )
            if going:
                arm.drafting += arm.passes(speculator, going)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        self._verified = {entry.request.request_id: [] for entry in self._entries}
        self._whole = {e.request.request_id: tree for e, tree in zip(self._entries, trees, strict=True)}
        chosen = list(trees)
        for arm in self.arms:
            own = [self._own(arm, entry, tree) for entry, tree in zip(self._entries, trees, strict=True)]
            fitted = arm.choose_nodes(own)
            if arm is self._leader:
                chosen = fitted
            for entry, tree in zip(self._entries, fitted, strict=True):
                self._verified[entry.request.request_id].append(tree)
        self.arms[0].learn_from(trees)  # of all that was drawn
        return chosen

    def _own(self, arm: Arm, entry: PlanEntry, tree: TokenTree) -> TokenTree:
        """The tree without drafts' levels that the arm would not have drawn."""
        name, depths = entry.request.request_id, tree.depths()
        if all(arm.levels.get((draft, name), 0) >= max(depths) for draft in self.models):
            return tree
        stays = {0}
        for draw in tree.draws:
            deep = depths[draw.node] <= arm.levels.get((draw.speculator, name), 0)
            if (draw.speculator not in self.models or deep) and draw.parent in stays:
                stays.add(draw.node)
        return tree if len(stays) == tree.num_nodes else keep(tree, sorted(stays))

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        return self._leader.appraise(trees)

    def observe(self, report: StepReport) -> None:
        committed = {
            one.request_id: one.committed for one in report.outcomes if one.request_id in self._whole
        }
        if committed and report.seconds and len(self.arms) > 1:
            self._credit(committed)
        self.arms[0].observe(report)
        self._whole, self._verified = {}, {}

    def _credit(self, committed: Mapping[str, Sequence[int]]) -> None:
        """Let every arm have what its choice would have brought, in tokens at the price of the last steps."""
        leading = self.arms.index(self._leader)
        values, costs = list[float](), list[float]()
        for i, arm in enumerate(self.arms):
            tokens, nodes = float(len(committed)) + arm.hoped, 0
            for name, text in committed.items():
                tree = self._verified[name][i]
                tokens += sum(1 for child in next_nodes(tree, text).values() if child is not None)
                nodes += tree.num_nodes - 1
            values.append(tokens)
            costs.append(arm.seconds(nodes) + self._rest)
        fade = 1 - 1 / PRICE_STEPS
        self._tokens = fade * self._tokens + values[leading]
        self._seconds = fade * self._seconds + costs[leading]
        price = self._tokens / self._seconds
        credits = [tokens - price * seconds for tokens, seconds in zip(values, costs, strict=True)]
        middle = credits[self.arms.index(self._neutral)]
        self.weights.learn([max(-1.0, min(1.0, credit - middle)) for credit in credits])


def _by_name(entries: Sequence[PlanEntry], answers: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    return {entry.request.request_id: answer for entry, answer in zip(entries, answers, strict=True)}


def page(cells: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Markdown: a row for each workload."""
    names = list(next(iter(cells.values()))["ratios"])
    lines = [
        f"# A hedge over degrees of eagerness: {Path(args.model).stem}",
        "",
        "Speed over the present policy's on the same texts, by the cost curves in the traces and without the "
        "time it takes to decide, with a 95% interval over texts. The guard is on.",
        "",
        row("workload", "texts", "tokens/s now", *names, "the first hedge's arms"),
        row(*["---"] * (len(names) + 4)),
    ]
    for workload, cell in cells.items():
        speeds = [f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in cell["ratios"].values()]
        shares = ", ".join(f"{name}: {share:.2f}" for name, share in cell["shares"]["hedge"].items())
        lines.append(row(workload, cell["texts"], f"{cell['tokens'] / cell['present']:.2f}", *speeds, shares))
    return lines


if __name__ == "__main__":
    run(main)
