"""Measures the Python microseconds per step for proposing, merging and choosing nodes, without a model.

    python -m benchmarks.speculation.deciding

A target and a draft are simulated with repetitive made-up texts and made-up costs, so every run makes the
same decisions. It runs with a draft that works level by level, with one that proposes trees in one pass, and
without a draft. The fastest of some rounds counts for each step, as other processes disturb the rest.

    draft     a DraftModel without its passes: choosing rows, drawing, observing (the one-pass draft is a
              stand-in, whose time is not counted)
    ...       lookups in texts, by speculator
    deciding  the policy: costs, the guard, acceptance probabilities, depths, node budgets
    merging   the rest of the ensemble: checks and merging into one tree
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.replay.drafts import CostTable, NoModel, TracedDraft, num_rows
from benchmarks.replay.engine import path_along
from benchmarks.study import natural, provenance_lines, row, run
from specinfer import SamplingParams
from specinfer.files import write_whole
from specinfer.kernels.library import Library
from specinfer.kernels.native import load_library
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.draws import Site
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.policy import StepReport
from specinfer.speculate.speculator import LevelSpeculator, Outcome, Speculator
from specinfer.speculate.table import build_speculators
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.draw import Runs, as_runs
from specinfer.tree.expansion import Expansion
from specinfer.tree.token_tree import single_node

VOCABULARY = 49152
EXPANSION = Expansion((1, 2, 2, 2, 2))  # 31 nodes
NODES = 32
PROMPT, ANSWER = 600, 600  # tokens
SKIPPED = 30  # steps that prefill or learn costs
TARGET = CostCurve((1, 64, 512), (5.0e-3, 5.4e-3, 30.0e-3))
DRAFT = CostCurve((1, 64, 512), (0.1e-3, 0.2e-3, 3.0e-3))
RIGHT = 0.8  # probability that the draft's first choice is correct
POLICY = ("begin_step", "worth_starting", "worth_deepening", "choose_nodes", "observe")


class Watch:
    """Seconds by part; a nested part does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Time the block."""
        outside, self._inner = self._inner, 0.0
        began = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self.seconds[part] = self.seconds.get(part, 0.0) + taken - self._inner
            self._inner = outside + taken

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed version of `call`."""

        def timed(*args: Any, **options: Any) -> Any:
            outside, self._inner = self._inner, 0.0
            began = time.perf_counter()
            answer = call(*args, **options)
            taken = time.perf_counter() - began
            self.seconds[part] = self.seconds.get(part, 0.0) + taken - self._inner
            self._inner = outside + taken
            return answer

        return timed


class Play:
    """Requests that run concurrently, with made-up texts."""

    def __init__(self, requests: int, watch: Watch, library: Library | None, *, draft: str) -> None:
        self._watch = watch
        self._now = 0.0
        self._costs, self._passes = CostTable(TARGET), CostTable(DRAFT)
        self._texts = [made_up(number) for number in range(requests)]
        self._written = [text[:PROMPT] for text in self._texts]
        self._computed = [0] * requests
        params = SamplingParams(temperature=0.0)
        self._requests = [Request(str(n), tuple(t), params, n) for n, t in enumerate(self._written)]
        config = SpeculationConfig(lookup=True, expansion=EXPANSION)
        looking_up = build_speculators(config, library)
        by_levels = TracedDraft(
            watch.timed("model", self._draw),
            "draft",
            NoModel(16, 1 << 20),
            Shape(EXPANSION, DrawRule.POINT_MASS),
            max_rows=4096,
        )
        drafts: list[DraftModel | Head] = []
        if draft != "none":
            drafts.append(by_levels if draft == "by levels" else Head(self._grow))
        for free in looking_up:
            for name in ("propose", "observe"):
                _watch(watch, free.name, free, name)
        for one in drafts:
            for name in ("begin", "deepen", "tree", "observe"):
                _watch(watch, "draft" if one is by_levels else "model", one, name)
        curves = {one.name: DRAFT for one in drafts}
        policy = CostPolicy.by_curves(TARGET, curves, config, measured=True)
        for name in POLICY:
            _watch(watch, "deciding", policy, name)
        asked: list[Speculator | LevelSpeculator] = [*looking_up, *drafts]
        limits = SpeculationLimits(config, asked)
        self._speculators = [limits.speculators(request) for request in self._requests]
        self._ensemble = Ensemble(asked, vocab=VOCABULARY, policy=policy, clock=lambda: self._now)
        self.nodes = self.steps = self.tokens = 0

    def step(self) -> bool:
        """Run one engine step; return False after the last."""
        entries = tuple(map(self._entry, range(len(self._requests))))
        plan, began = StepPlan(entries), self._now
        with self._watch.timing("merging"):
            trees = self._ensemble.propose(plan)
        seconds = {"propose": self._now - began}
        rows = sum(entry.end - entry.start for entry in entries) + sum(tree.num_nodes - 1 for tree in trees)
        seconds["target_forward"] = self._costs.seconds(rows)
        self._now += seconds["target_forward"]
        outcomes = []
        for n, tree in enumerate(trees):
            end = len(self._written[n])
            path = path_along(tree, self._texts[n], end)
            committed = self._texts[n][end : end + len(path) + 1]
            self._written[n].extend(committed)
            self._computed[n] = end + len(path)
            outcomes.append(Outcome(str(n), tuple(committed), False))
            self.tokens += len(committed)
        with self._watch.timing("merging"):
            self._ensemble.observe(StepReport(outcomes, seconds))
        self.nodes += sum(tree.num_nodes for tree in trees)
        self.steps += 1
        return min(map(len, self._written)) < PROMPT + ANSWER - NODES

    def _entry(self, n: int) -> PlanEntry:
        end = len(self._written[n])
        return PlanEntry(
            self._requests[n],
            self._written[n],
            start=self._computed[n],
            end=end,
            max_nodes=NODES,
            max_depth=NODES,
            block_table=(),
            generation=0,
            speculators=self._speculators[n],
            room=PROMPT + ANSWER - end,
        )

    def _draw(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Draw children: mostly the text's next token first if the path follows the text, and others."""
        self._now += self._passes.seconds(num_rows(rows))
        for site in sites:
            self._add(site.builder, int(site.request_id), site.node, site.position, site.width)

    def _grow(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        """Return trees of the same shape, built at once."""
        self._now += self._passes.seconds(len(entries))
        trees = list[TokenTree]()
        for entry in entries:
            builder, level = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes), [0]
            for depth, width in enumerate(EXPANSION.widths):
                before = len(builder.token_ids)
                for node in level:
                    self._add(builder, int(entry.request.request_id), node, entry.end + depth, width)
                level = [*range(before, len(builder.token_ids))]
            tree = builder.build()
            trees.append(replace(tree, draws=Runs(as_runs(tree.draws).runs)))  # as the library stores draws
        return trees

    def _add(self, builder: TreeBuilder, n: int, node: int, at: int, width: int) -> None:
        """Add children of a node, with tokens for this position of a text."""
        path, text = builder.path_tokens(node), self._texts[n]
        chance = random.Random(hash((n, at, path)))
        tokens = [chance.randrange(VOCABULARY) for _ in range(width)]
        if at < len(text) and tuple(text[at - len(path) : at]) == path:
            luck = chance.random()
            if luck < RIGHT:
                tokens[0] = text[at]
            elif luck < (1 + RIGHT) / 2:
                tokens[-1] = text[at]
        left = 1.0
        for token in dict.fromkeys(tokens):
            sure = left * chance.uniform(0.5, 0.95)
            left -= sure
            builder.add(node, token, "draft", confidence=sure, evidence=(sure, left))


class Head(LevelSpeculator):
    """A level speculator whose trees are complete after their first level."""

    name = "draft"

    def __init__(self, grow: Callable[[Sequence[PlanEntry]], list[TokenTree]]) -> None:
        self._grow = grow
        self._entries: Sequence[PlanEntry] = ()
        self._trees: list[TokenTree] = []

    def max_nodes(self, request: Request) -> int:
        """Return the number of nodes of a complete tree, without the root."""
        return EXPANSION.num_nodes - 1

    def begin(self, plan: StepPlan) -> list[int]:
        """Start a step; only the root is unread."""
        self._entries = plan.entries
        self._trees = [single_node(entry.token_ids[entry.end - 1]) for entry in plan.entries]
        return [1] * len(plan.entries)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Grow these trees."""
        for i, tree in zip(below, self._grow([self._entries[i] for i in below]), strict=True):
            self._trees[i] = tree
        return {}

    def tree(self, entry: int) -> TokenTree:
        """Return the grown tree."""
        return self._trees[entry]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Do nothing."""


def made_up(seed: int) -> list[int]:
    """Return a text of repeated phrases, some more frequent than others, with single tokens between."""
    chance = random.Random(seed)
    known = [[chance.randrange(2000) for _ in range(chance.randint(2, 12))] for _ in range(80)]
    text: list[int] = []
    while len(text) < PROMPT + ANSWER + NODES:
        text += known[int(80 * chance.random() ** 2)]
        if chance.random() < 0.3:
            text.append(chance.randrange(VOCABULARY))
    return text


def _watch(watch: Watch, part: str, of: Any, name: str) -> None:
    if hasattr(of, name):
        setattr(of, name, watch.timed(part, getattr(of, name)))


def measure(requests: int, rounds: int, library: Library | None, *, draft: str) -> dict[str, Any]:
    """Return the mean microseconds of a step by part; each step counts its fastest round."""
    steps: list[dict[str, float]] = []
    for _ in range(rounds):
        watch = Watch()
        play, number, goes_on = Play(requests, watch, library, draft=draft), 0, True
        while goes_on:
            watch.seconds = {}
            goes_on = play.step()
            if number == len(steps):
                steps.append(watch.seconds)
            for part, seconds in watch.seconds.items():
                steps[number][part] = min(seconds, steps[number][part])
            number += 1
    counted = steps[SKIPPED:]
    parts = sorted(set().union(*counted) - {"model"})
    return {
        "steps": play.steps,
        "nodes": play.nodes / play.steps / requests,
        "tokens": play.tokens / play.steps / requests,
        "microseconds": {
            part: 1e6 * sum(step.get(part, 0.0) for step in counted) / len(counted) for part in parts
        },
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=natural, default=20, help="rounds; the fastest counts (default 20)")
    options.add_argument("--twins", action="store_true", help="without native kernels (default: with them)")
    options.add_argument("--out", type=Path, help="Markdown file (default: none)")
    args = options.parse_args()
    library = None if args.twins else load_library()
    cells = {
        (requests, draft): measure(requests, args.rounds, library, draft=draft)
        for draft in ("by levels", "in one pass", "none")
        for requests in (1, 8)
    }
    parts = list(cells[1, "by levels"]["microseconds"])
    lines = [
        "# Microseconds a step takes to guess, merge and decide",
        "",
        row(
            "requests",
            "a draft",
            "steps",
            "nodes of a tree",
            "tokens of a step",
            *parts,
            "deciding and merging",
        ),
        "|" + "---|" * (len(parts) + 6),
    ]
    for (requests, draft), cell in cells.items():
        taken = {part: cell["microseconds"].get(part, 0.0) for part in parts}
        both = taken["deciding"] + taken["merging"]
        figures = [f"{cell['nodes']:.1f}", f"{cell['tokens']:.2f}", *(f"{taken[part]:.0f}" for part in parts)]
        lines.append(row(requests, draft, cell["steps"], *figures, f"{both:.0f}"))
    page = "\n".join([*lines, "", *provenance_lines(), ""])
    print(page)
    if args.out is not None:
        write_whole(args.out, page)


if __name__ == "__main__":
    run(main)
