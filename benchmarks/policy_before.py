"""Is the policy quicker than that of commit e8ef1bf, which asked drafts before those that cost nothing?

    python benchmarks/policy_before.py --traces TRACE... --out RESULT.md

That one knew no cost of a wrong curve and had no guard, no logistic, no patience and no extension; whether a
draft was worth a level was weighed against the draft's own guesses alone. It decides here by its own rule,
with today's speculators: what these guess has changed, too, and is not compared. Traces are files of kinds,
kind-00, kind-01, ... Each is played for itself, then all in turns, by the traces' own curves, all paired on
the same texts with 95% intervals over texts. With `--times` each text comes so often in a row, as a server is
asked the same again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from policy_matching_length import ratio, workloads
from study import Study, natural, parser, row, run, settings_of

from specinfer.plan import PlanEntry, StepPlan
from specinfer.replay.drafts import CostTable
from specinfer.replay.replay import Part, cost_policy, play, play_without
from specinfer.replay.simulated_engine import SimulatedEngine, replayed_drafts, speculators_of
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.runtime.cost_model import CostModel, PassCosts
from specinfer.speculate.policy.calibration import Calibration
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.speculate.policy.tokens_per_second import fastest
from specinfer.speculate.speculator import LevelOutcome
from specinfer.tree import TokenTree
from specinfer.tree.expansion import Expansion
from specinfer.tree.prune import keep
from specinfer.tree.token_tree import draws_by_parent, single_node

CURIOSITY = 0.01  # of all time goes at most into drafts that do not seem worth it
USUAL_UNREAD = 2  # tokens a draft reads in every step


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", nargs="+", type=Path, required=True, help="kind-00, kind-01, ...")
    options.add_argument("--times", type=natural, default=1, help="each text, in a row (default 1)")
    args = options.parse_args()
    study = Study("policy-before", args.out, settings_of(args))
    traces = {path.stem: read_trace(path) for path in args.traces}
    for name, order in workloads(traces).items():
        if name not in study.cells:
            study.keep(name, played([text for text in order for _ in range(args.times)], traces))
            print(name, study.cells[name], flush=True)
    study.write(page(study.cells, args.times))


def played(order: Sequence[tuple[str, int]], traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Speed of both over none, and of today's over the one before, with intervals."""
    texts = [(traces[name], number) for name, number in order]
    first = texts[0][0]
    none = play_without([Part(texts)])
    now = play([Part(texts)], cost_policy(first, first.speculation))
    before = seconds_before(texts)
    return {
        "texts": len(texts),
        "tokens": none.tokens,
        "before": ratio(none.of_texts, before),
        "now": ratio(none.of_texts, now.of_texts),
        "over": ratio(before, now.of_texts),
    }


def seconds_before(texts: Sequence[tuple[Trace, int]]) -> list[float]:
    """Seconds of each text under the policy before, drafts asked first, one text after the other."""
    trace = texts[0][0]
    speculation = replace(trace.speculation, expansion=trace.speculation.fixed_expansion)
    replayed = replayed_drafts(trace)
    speculators = speculators_of(speculation, trace, replayed)
    speculators.sort(key=lambda speculator: speculator.name not in replayed)
    engine = SimulatedEngine(
        *(trace.engine, speculators, Before(trace), speculation, CostTable(trace.curve), trace.stages),
        batch=1,
        replayed=replayed,
    )
    seconds = [0.0] * len(texts)
    for step in engine.play(texts):
        seconds[int(step.requests[0])] += sum(step.seconds.values())
    return seconds


class LevelsBefore(DraftCosts):
    """A draft's costs, of whose levels the last 100 outcomes or so are counted beside eight guessed ones."""

    def __init__(self, costs: PassCosts, expansion: Expansion) -> None:
        super().__init__(costs, expansion)
        self._seen = [[0.0, 0.0] for _ in expansion.widths]  # hits and tries

    def learn(self, seen: LevelOutcome, temperature: float | None = None) -> None:
        for counts in self._seen if seen.level == 0 else ():
            counts[:] = 0.99 * counts[0], 0.99 * counts[1]
        if seen.level < len(self._seen):
            hits, tries = self._seen[seen.level]
            self._seen[seen.level] = [hits + (seen.choice is not None), tries + 1]

    def rates(self) -> list[LevelRate]:
        rates = [0.7]
        for hits, tries in self._seen:
            rates.append((hits + 8 * rates[-1]) / (tries + 8))
        return [LevelRate(rate, 0.0) for rate in rates[1:]]


class Before(FixedPolicy):
    """CostSize of e8ef1bf, specinfer/speculate/cost_size.py, for one request at a time without samples."""

    def __init__(self, trace: Trace) -> None:
        self._target = trace.curve
        self._drafts = {
            name: LevelsBefore(CostModel(name, draft.curve, learns=False), trace.speculation.fixed_expansion)
            for name, draft in trace.drafts.items()
        }
        self._counts = Calibration()
        self._saved = dict.fromkeys(self._drafts, 0.0)
        self._rows, self._spent = 0, 0.0

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self._rows = sum(entry.end - entry.start for entry in plan.entries)
        alone, with_prompts = self._target.seconds([len(plan.entries), self._rows])
        self._spent = float(alone - with_prompts)
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        [entry], draft = entries, self._drafts[speculator]
        tree = guessed[0] if guessed else single_node(0)
        hopes = self._counts.probabilities(tree)
        gain = draft.rate(0).any * max(0.0, 1.0 - at_depth(1, tree, hopes))
        tokens, rows = sum(hopes), self._rows + tree.num_nodes - 1
        [share] = [part * (1 + gain) / (entry.max_depth + 1) for part in draft.reading(unread, USUAL_UNREAD)]
        without, verified = (self._spent + float(self._target.seconds([rows + more])[0]) for more in (0, 1))
        step = verified + draft.alone(USUAL_UNREAD) + share
        worth = gain * without > share * tokens and (tokens + gain) / step > tokens / without
        self._saved[speculator] += CURIOSITY * (step if worth else without)
        if not worth and self._saved[speculator] >= draft.alone(unread[0]):
            self._saved[speculator], worth = 0.0, True
        self._spent += draft.alone(1) if worth else 0.0
        return [worth]

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        [tree], [below], draft = trees, ends, self._drafts[speculator]
        level, hopes = max(tree.depths()), self._counts.probabilities(tree)
        seconds = self._spent + self._target.seconds(self._rows + np.arange(len(hopes)))
        stays = fastest(hopes[1:], 1.0, seconds)
        kept = [hope for hope, stay in zip(hopes[1:], stays, strict=True) if stay]
        tokens, rows = 1.0 + sum(kept), self._rows + len(kept)
        gain = at_depth(level, tree, hopes) * draft.rate(level).any
        passes = draft.alone(len(below))
        without, more = (self._spent + float(self._target.seconds([rows + n])[0]) for n in (0, 1))
        goes_on = (tokens + gain) / (more + passes) > tokens / without
        self._spent += passes if goes_on else 0.0
        return [below if goes_on else ()]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        if not trees:
            return []
        [self._tree] = trees
        hopes = self._counts.probabilities(self._tree)
        seconds = self._spent + self._target.seconds(self._rows + np.arange(len(hopes)))
        stays = fastest(hopes[1:], 1.0, seconds)
        return [keep(self._tree, [0, *(node for node, stay in enumerate(stays, start=1) if stay)])]

    def observe(self, report: StepReport) -> None:
        below, children, node = draws_by_parent(self._tree.draws), self._tree.children(), 0
        for outcome in report.outcomes if self._tree.num_nodes > 1 else ():
            for level, token in enumerate(outcome.committed):
                draws, child = below.get(node, []), children[node].get(token)
                self._counts.learn(draws, child)
                for name in {draw.speculator for draw in draws} & self._drafts.keys():
                    hit = any(draw.node == child and draw.speculator == name for draw in draws)
                    self._drafts[name].learn(LevelOutcome(outcome.request_id, level, 0 if hit else None))
                if child is None:
                    break
                node = child


def at_depth(depth: int, tree: TokenTree, hopes: Sequence[float]) -> float:
    """The probability that one of a tree's nodes of that depth becomes text."""
    return sum(hope for hope, at in zip(hopes, tree.depths(), strict=True) if at == depth)


def page(cells: Mapping[str, Any], times: int) -> list[str]:
    """Markdown: a row for each workload, in which each text comes so often."""
    often = [f"Each text comes {times} times in a row."] if times > 1 else []
    lines = [
        "# The policy, and that of e8ef1bf",
        "",
        "Speed over none, and over the policy before, on the same texts, with 95% intervals over texts.",
        *often,
        "",
        row("workload", "texts", "tokens", "before, over none", "now, over none", "now, over before"),
        row(*["---"] * 6),
    ]
    for name, cell in cells.items():
        speeds = ["{:.3f} [{:.3f}, {:.3f}]".format(*cell[what]) for what in ("before", "now", "over")]
        lines.append(row(name, cell["texts"], cell["tokens"], *speeds))
    return lines


if __name__ == "__main__":
    run(main)
