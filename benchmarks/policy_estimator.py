"""What it is worth to know how likely guesses are: counts, a logistic, whichever is better, and a small net.

    python benchmarks/policy_estimator.py --traces alpaca.npz gsm8k.npz --fit dolly.npz --out RESULT.md

Of each trace (`specinfer trace record`), whose texts are played one after the other:

- how well each estimator knows what becomes of guesses, all of those below the text that the policy with
  counts was shown: their log-loss, the area under the curve (AUC) and the calibration error of ten bins
  (ECE). Each says how likely a guess is before it learns what became of it.
- tokens per second by the trace's clock when the policy asks it, over the policy that asks counts, on the
  same texts, with a 95% interval over texts (bootstrap, paired). What estimators take themselves is not in
  it: `python benchmarks/deciding.py`.

The traces of --fit are others (where none are given, of each trace all the others are): the net is trained on
their guesses first, and "knowing" is the estimator with what it has learnt of them, as it is when it was kept
on disk. With --weights the weights of a logistic
that is fitted to them are printed as specinfer/speculate/policy/priors.py has them, and nothing else is
done.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from study import Study, parser, row, run

from specinfer.plan import PlanEntry, StepPlan
from specinfer.replay.replay import play, play_without, policy_with
from specinfer.replay.simulated_engine import PlayedStep
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.replay.workloads import whole
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.policy.estimator import Estimator, Rival, rates_of_nodes
from specinfer.speculate.policy.features import NAMES, features_of
from specinfer.speculate.policy.logistic import UNSURE, Logistic
from specinfer.speculate.policy.speculation_policy import SpeculationPolicy, StepReport
from specinfer.tree import Draw, TokenTree
from specinfer.tree.token_tree import draws_by_parent, next_nodes

ESTIMATORS: Final = ("counts", "counts, knowing", "logistic", "unfitted", "chosen", "knowing", "net")
PLAYED: Final = ("counts, knowing", "chosen", "knowing", "net")
HIDDEN: Final = 16  # units of the net
EPOCHS: Final = 30
ROUNDS: Final = 2000  # of the bootstrap
BELIEVED: Final = (0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
LEAST_SQUARES: Final = 1.0  # of a fitted logistic's weights: their penalty

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Place:
    """All draws below one node of a text, the node of those that were right, and where that was."""

    draws: list[Draw]
    accepted: int | None
    temperature: float
    request: str
    end: int  # tokens of the text when the tree was grown, the prompt's and the root included
    depth: int  # of the node; 0: the root


@dataclass(slots=True)
class Watching:
    """A policy, and what it was shown: the draws below every node of the text."""

    policy: SpeculationPolicy
    places: list[Place] = field(default_factory=list)
    entries: Sequence[PlanEntry] = ()
    trees: dict[str, tuple[TokenTree, PlanEntry]] = field(default_factory=dict)

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self.entries = plan.tree_entries
        return self.policy.begin_step(plan)

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        return self.policy.worth_starting(speculator, entries, unread, guessed)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        return self.policy.worth_deepening(speculator, entries, trees, ends)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        self.trees = {
            entry.request.request_id: (tree, entry) for entry, tree in zip(self.entries, trees, strict=True)
        }
        return self.policy.choose_nodes(trees)

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal | None:
        return self.policy.appraise(trees)

    def observe(self, report: StepReport) -> None:
        for outcome in report.outcomes:
            tree, entry = self.trees[outcome.request_id]
            below, heat = draws_by_parent(tree.draws), entry.request.params.temperature
            for depth, (node, child) in enumerate(next_nodes(tree, outcome.committed).items()):
                if node in below:
                    place = Place(below[node], child, heat, outcome.request_id, entry.end, depth)
                    self.places.append(place)
        self.policy.observe(report)


class Net:
    """A net of one layer between the features and the answer, for all speculators, that learns on."""

    def __init__(self, places: Iterable[Place], seed: int = 0) -> None:
        """Trained on what became of these guesses, by Adam; then by plain steps, a guess at a time."""
        chance = np.random.default_rng(seed)
        size = len(NAMES) + 4
        self._parts = [
            chance.normal(0, size**-0.5, (HIDDEN, size)),
            np.zeros(HIDDEN),
            chance.normal(0, HIDDEN**-0.5, HIDDEN),
            np.zeros(1),
        ]
        inputs, became = list[Floats](), list[float]()
        for place in places:
            inputs += self._inputs(place.draws, place.temperature)
            became += [float(draw.node == place.accepted) for draw in place.draws]
        if inputs:
            self._train(np.array(inputs), np.array(became), chance)

    def rates(self, draws: Sequence[Draw], temperature: float) -> list[float]:
        if not draws:
            return []
        _, likely = self._forward(np.array(self._inputs(draws, temperature)))
        rates: list[float] = np.clip(likely, UNSURE, 1 - UNSURE).tolist()
        return rates

    def learn(self, below: Sequence[Draw], accepted: int | None, temperature: float) -> None:
        if not below:
            return
        became = np.array([float(draw.node == accepted) for draw in below])
        for part, slope in zip(
            self._parts, self._slopes(np.array(self._inputs(below, temperature)), became), strict=True
        ):
            part -= 0.02 * len(below) * slope

    def node_rates(self, draws: Sequence[Draw], num_nodes: int, temperature: float) -> list[float]:
        return rates_of_nodes(draws, self.rates(draws, temperature), num_nodes)

    @staticmethod
    def _inputs(draws: Sequence[Draw], temperature: float) -> list[Floats]:
        """The features, and which kind of evidence a draw has."""
        kinds = np.eye(4)
        return [
            np.concatenate([features, kinds[min(len(draw.evidence), 3)]])
            for draw, features in zip(draws, features_of(draws, temperature), strict=True)
        ]

    def _forward(self, inputs: Floats) -> tuple[Floats, Floats]:
        first, bias, second, last = self._parts
        units = np.tanh(inputs @ first.T + bias)
        return units, 1 / (1 + np.exp(-(units @ second + last[0])))

    def _slopes(self, inputs: Floats, became: Floats) -> list[Floats]:
        """Of the mean log-loss, by part."""
        units, likely = self._forward(inputs)
        error = (likely - became) / len(became)
        back = error[:, None] * self._parts[2] * (1 - units**2)
        return [back.T @ inputs, back.sum(0), units.T @ error, np.array([error.sum()])]

    def _train(self, inputs: Floats, became: Floats, chance: np.random.Generator) -> None:
        means = [np.zeros_like(part) for part in self._parts]
        squares = [np.zeros_like(part) for part in self._parts]
        step = 0
        for _ in range(EPOCHS):
            order = chance.permutation(len(became))
            for first in range(0, len(order), 64):
                batch, step = order[first : first + 64], step + 1
                for i, slope in enumerate(self._slopes(inputs[batch], became[batch])):
                    means[i] = 0.9 * means[i] + 0.1 * slope
                    squares[i] = 0.999 * squares[i] + 0.001 * slope**2
                    mean, square = means[i] / (1 - 0.9**step), squares[i] / (1 - 0.999**step)
                    self._parts[i] -= 3e-3 * mean / (np.sqrt(square) + 1e-8)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, nargs="+", required=True, metavar="TRACE", help="played")
    options.add_argument("--fit", type=Path, nargs="+", default=[], metavar="TRACE", help="learnt from first")
    options.add_argument("--weights", action="store_true", help="print fitted weights, and end")
    args = options.parse_args()
    played, fitted = on_one_clock([read_trace(path) for path in [*args.traces, *args.fit]], len(args.traces))
    if args.weights:
        for pieces, (guesses, weights) in fit([p for trace in fitted for p in shown(trace)]).items():
            print(f"{pieces} numbers of evidence, {guesses} guesses: {[round(w, 2) for w in weights]}")
        return
    settings = {
        "model": played[0].model,
        "traces": [path.name for path in args.traces],
        "fit": [path.name for path in args.fit],
    }
    study = Study("policy_estimator", args.out, settings)
    places = [shown(trace) for trace in fitted or played]
    for number, (path, trace) in enumerate(zip(args.traces, played, strict=True)):
        if path.stem not in study.cells:
            others = places if fitted else places[:number] + places[number + 1 :]
            study.keep(path.stem, measured(trace, [place for of_trace in others for place in of_trace]))
            print("\n".join(rows_of(path.stem, study.cells[path.stem])), flush=True)
    study.write(page(study.cells, played[0], fitted))


def on_one_clock(traces: Sequence[Trace], played: int) -> tuple[list[Trace], list[Trace]]:
    """The traces to play and the others, all with the costs of the one whose stages were the quickest."""
    quickest = min(traces, key=lambda trace: sum(trace.stages.values()))
    alike = [
        replace(
            trace,
            curve=quickest.curve,
            stages=quickest.stages,
            drafts={
                name: replace(draft, curve=quickest.drafts[name].curve)
                for name, draft in trace.drafts.items()
            },
        )
        for trace in traces
    ]
    return alike[:played], alike[played:]


def shown(trace: Trace) -> list[Place]:
    """What the policy that asks counts is shown while it plays a trace."""
    watching = Watching(policy_with(Estimator(logistics=False), trace, trace.speculation))
    play(whole([trace]), watching, speculation=trace.speculation)
    return watching.places


def estimators(before: Sequence[Place]) -> dict[str, Any]:
    """One of each kind, as it is when it has learnt what it may before."""
    counting, knowing = Estimator(logistics=False), Estimator()
    for place in before:
        counting.learn(place.draws, place.accepted, place.temperature)
        knowing.learn(place.draws, place.accepted, place.temperature)
    names = {draw.speculator for place in before for draw in place.draws} | {"draft", "ngram", "suffix"}
    return {
        "counts": Estimator(logistics=False),
        "counts, knowing": counting,
        "logistic": Estimator(),
        "unfitted": Estimator(rivals={name: Rival(Logistic(BELIEVED)) for name in sorted(names)}),
        "chosen": Estimator(),
        "knowing": knowing,
        "net": Net(before),
    }


def measured(trace: Trace, before: Sequence[Place]) -> dict[str, Any]:
    """How well each knows, and how many tokens per second it makes, as plain JSON values."""
    watching = Watching(policy_with(Estimator(logistics=False), trace, trace.speculation))
    counted = seconds_of(trace, watching)
    known = {name: knows(name, one, watching.places) for name, one in estimators(before).items()}
    plain = play_without(whole([trace]))
    speeds = {}
    for name, one in estimators(before).items():
        if name in PLAYED:
            others = seconds_of(trace, policy_with(one, trace, trace.speculation))
            speeds[name] = compared(counted, others)
    return {
        "tokens": plain.tokens,
        "guesses": sum(len(place.draws) for place in watching.places),
        "known": known,
        "over_none": plain.seconds / sum(counted.values()),
        "over_counts": speeds,
    }


def knows(name: str, estimator: Any, places: Sequence[Place]) -> dict[str, float]:
    """Log-loss, AUC and calibration error of one that learns on, over all guesses."""
    likely, became = list[float](), list[bool]()
    for place in places:
        likely += estimator.rates(place.draws, place.temperature)
        became += [draw.node == place.accepted for draw in place.draws]
        estimator.learn(place.draws, place.accepted, place.temperature)
        if name in ("logistic", "unfitted"):  # it is asked in any case
            for rival in estimator.rivals.values():
                rival.lead = 0.0
    rates, right = np.clip(likely, UNSURE, 1 - UNSURE), np.array(became)
    return {
        "loss": float(-np.log(np.where(right, rates, 1 - rates)).mean()),
        "auc": area(rates, right),
        "ece": calibration_error(rates, right),
    }


def area(rates: Floats, right: NDArray[np.bool_]) -> float:
    """How often a guess that was right had a higher rate than one that was not; ties count half."""
    _, place, count = np.unique(rates, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    rank = ((last - count + 1 + last) / 2)[place]
    hits, misses = int(right.sum()), int((~right).sum())
    if not hits or not misses:
        return float("nan")
    return float((rank[right].sum() - hits * (hits + 1) / 2) / (hits * misses))


def calibration_error(rates: Floats, right: NDArray[np.bool_], bins: int = 10) -> float:
    """By how much rates differ from what came of them, on average over bins."""
    of = np.minimum((rates * bins).astype(int), bins - 1)
    apart = [(of == one).mean() * abs(rates[of == one].mean() - right[of == one].mean()) for one in {*of}]
    return float(sum(apart))


def seconds_of(trace: Trace, policy: SpeculationPolicy) -> dict[str, float]:
    """Seconds that each text takes, one after the other."""
    taken: dict[str, float] = {}

    def note(step: PlayedStep) -> None:
        for entry in step.entries:
            taken[entry.request_id] = taken.get(entry.request_id, 0.0) + sum(step.seconds.values())

    play(whole([trace]), policy, speculation=trace.speculation, on_step=note)
    return taken


def compared(before: Mapping[str, float], now: Mapping[str, float]) -> list[float]:
    """How much quicker texts are now, and the ends of a 95% interval over texts."""
    names, chance, found = list(before), random.Random(0), list[float]()
    for _ in range(ROUNDS):
        some = chance.choices(names, k=len(names))
        found.append(sum(before[name] for name in some) / sum(now[name] for name in some))
    found.sort()
    ends = found[round(0.025 * ROUNDS)], found[round(0.975 * ROUNDS) - 1]
    return [sum(before.values()) / sum(now.values()), *ends]


def fit(places: Sequence[Place]) -> dict[int, tuple[int, list[float]]]:
    """By how many numbers the evidence has: guesses, and the weights of a logistic, by Newton's steps."""
    inputs: dict[int, list[Sequence[float]]] = {}
    became: dict[int, list[float]] = {}
    for place in places:
        for draw, features in zip(place.draws, features_of(place.draws, place.temperature), strict=True):
            inputs.setdefault(len(draw.evidence), []).append(features)
            became.setdefault(len(draw.evidence), []).append(float(draw.node == place.accepted))
    fitted = {}
    for pieces, of_kind in sorted(inputs.items()):
        x, y, weights = np.array(of_kind), np.array(became[pieces]), np.zeros(len(NAMES))
        for _ in range(30):
            likely = 1 / (1 + np.exp(-x @ weights))
            slope = x.T @ (likely - y) + LEAST_SQUARES * weights
            curve = (x * (likely * (1 - likely))[:, None]).T @ x + LEAST_SQUARES * np.eye(len(NAMES))
            weights = weights - np.linalg.solve(curve, slope)
        fitted[pieces] = (len(y), weights.tolist())
    return fitted


def page(cells: Mapping[str, Any], first: Trace, fitted: Sequence[Trace]) -> list[str]:
    """Markdown: what each estimator knows of each trace, and how quick the policy is with it."""
    drafts = ", ".join(draft.model for draft in first.drafts.values()) or "no draft"
    said = row("trace", "guesses", *ESTIMATORS)
    lines = row(*["---"] * (len(ESTIMATORS) + 2))
    tables = [
        line
        for figure, title, digits in (
            ("loss", "Log-loss", 4),
            ("auc", "AUC", 3),
            ("ece", "Calibration error", 3),
        )
        for line in (
            f"## {title}",
            "",
            said,
            lines,
            *(
                row(
                    name,
                    cell["guesses"],
                    *(f"{cell['known'][one][figure]:.{digits}f}" for one in ESTIMATORS),
                )
                for name, cell in cells.items()
            ),
            "",
        )
    ]
    return [
        f"# Estimators of guesses: {first.model} with {drafts}",
        "",
        "Each is asked before it learns what became of a guess. *logistic* begins with the weights that are "
        "shipped, *unfitted* believes confidences at first; *chosen* is the engine's: the logistic while it "
        "beats the counts; *knowing* has learnt of other texts before, as when it was kept on disk; *net* is "
        f"an MLP of {HIDDEN} units, trained on these and learning on. Learnt from before: "
        f"{learnt_from(fitted)}.",
        "",
        *tables,
        "## Tokens per second, over counts",
        "",
        "Replayed on the same texts by one clock, with 95% intervals over texts. What estimators take "
        "themselves is not in it.",
        "",
        row("trace", "tokens", "counts, over none", *PLAYED),
        row(*["---"] * (len(PLAYED) + 3)),
        *(line for name, cell in cells.items() for line in rows_of(name, cell)),
    ]


def learnt_from(fitted: Sequence[Trace]) -> str:
    """What estimators that know have learnt from."""
    tokens = sum(trace.places for trace in fitted)
    return f"{tokens} tokens of others" if fitted else "of each trace all the others here"


def rows_of(name: str, cell: Mapping[str, Any]) -> list[str]:
    """A trace's row of the last table."""
    speeds = ["{:.3f} ({:.3f} to {:.3f})".format(*cell["over_counts"][one]) for one in PLAYED]
    return [row(name, cell["tokens"], f"{cell['over_none']:.3f}", *speeds)]


if __name__ == "__main__":
    run(main)
