"""An engine with simulated pass times on a simulated clock, to measure the cost of policy decisions.

The text is given, so decisions cannot change it; ensemble and policy are real. The clock that the policy
reads may differ from the machine's time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specinfer import SamplingParams
from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from tests import plans

WRONG = 99  # a token that no text has
PARAMS = SamplingParams(temperature=0)
OVERHEAD = 0.05  # seconds of a step besides its passes

Seconds = Callable[[int], float]  # seconds of a pass, by its rows


def word(position: int) -> int:
    """Return the token at this position of every text."""
    return position % 97


@dataclass
class Machine:
    """A simulated machine: its time and its passes' seconds."""

    target: Seconds
    draft: Seconds
    slowness: Callable[[float], float] = lambda now: 1.0  # factor on all passes, by time
    now: float = 0.0

    def run(self, seconds: float) -> None:
        """Advance by `seconds`, times the slowness."""
        self.now += seconds * self.slowness(self.now)


@dataclass
class Guesser(LevelSpeculator):
    """A draft with one proposal per level, correct with a probability that may change by step."""

    machine: Machine
    hits: Callable[[int], float]  # probability, by step
    depth: int = 4
    name: str = "draft"
    confidence: float = 0.8
    chance: int = 7  # the seed
    gone_at: int | None = None  # a step in which it raises
    step: int = 0
    passes: int = 0
    _read: dict[str, int] = field(default_factory=dict)
    _plan: StepPlan = field(default_factory=lambda: StepPlan(()))
    _trees: list[TreeBuilder] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.chance)

    def begin(self, plan: StepPlan) -> list[int]:
        """Read the unread tokens of all texts."""
        self._plan = plan
        self._trees = [TreeBuilder(e.token_ids[e.end - 1], max(1, e.max_nodes)) for e in plan.entries]
        self._depths = [0] * len(plan.entries)
        return [len(e.token_ids) - self._read.get(e.request.request_id, 0) for e in plan.entries]

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Return a row per unread token or last proposal."""
        if self.gone_at is not None and self.step >= self.gone_at:
            raise RuntimeError("gone")
        rows, going = 0, dict[int, Sequence[int]]()
        for i in below:
            entry, depth = self._plan.entries[i], self._depths[i]
            rows += 1 if depth else entry.end - self._read.get(entry.request.request_id, 0)
            self._read[entry.request.request_id] = entry.end
            if not entry.has_tree:
                continue
            right = self._random.random() < self.hits(self.step)
            token = word(entry.end + depth) if right else WRONG
            self._trees[i].add(depth, token, self.name, DrawRule.POINT_MASS, confidence=self.confidence)
            self._depths[i] += 1
            if self._depths[i] < self.depth and not self._trees[i].full:
                going[i] = (self._depths[i],)
        self.passes += 1
        self.machine.run(self.machine.draft(rows))
        return going

    def tree(self, entry: int) -> TokenTree:
        """Return the chain so far."""
        return self._trees[entry].build()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Count its correct proposals as read; forget finished texts."""
        self.step += any(outcome.committed for outcome in outcomes)
        depths = {e.request.request_id: d for e, d in zip(self._plan.entries, self._depths, strict=True)}
        for outcome in outcomes:
            name = outcome.request_id
            if outcome.finished:
                self._read.pop(name, None)
            elif depths.get(name):
                self._read[name] += min(len(outcome.committed), depths[name]) - 1
        self._plan, self._depths = StepPlan(()), []


@dataclass
class Simulation:
    """Runs engine steps with `batch(step)` requests, each with `length` answer tokens after a prompt."""

    machine: Machine
    policy: SpeculationPolicy
    guessers: Sequence[Guesser]
    reading: Callable[[float], float] = lambda now: now  # the clock's reading at a time
    batch: Callable[[int], int] = lambda step: 1
    length: int = 10**9
    prompt: int = 1  # tokens; more than one are prefilled in a separate step
    chunk: int = 64  # prompt rows per step
    nodes: int = 16  # per tree
    without: Seconds | None = None  # target passes without proposals; None: the same curve
    plain: float = 0.0  # seconds of the same texts without proposals
    tokens: int = 0
    steps: int = 0
    _texts: dict[str, list[int]] = field(default_factory=dict)
    _computed: dict[str, int] = field(default_factory=dict)
    _born: int = 0

    def __post_init__(self) -> None:
        self.ensemble = Ensemble(
            self.guessers, vocab=100, policy=self.policy, clock=lambda: self.reading(self.machine.now)
        )

    def run(self, steps: int) -> float:
        """Run `steps` steps; return their seconds divided by those without proposals."""
        began, plain = self.machine.now, self.plain
        for _ in range(steps):
            self._step()
        return (self.machine.now - began) / (self.plain - plain)

    def _step(self) -> None:
        self.steps += 1
        while len(self._texts) < self.batch(self.steps):
            self._born += 1
            self._texts[str(self._born)] = [word(i) for i in range(self.prompt)]
        while len(self._texts) > self.batch(self.steps):
            self._end(next(iter(self._texts)))
        entries = [self._entry(name, text) for name, text in self._texts.items()]
        plan = StepPlan(tuple(entries))
        seconds: dict[str, float] = {}
        slowness = self.machine.slowness(self.machine.now)  # during this step
        before = self.reading(self.machine.now)
        trees = self.ensemble.propose(plan)
        seconds["propose"] = self.reading(self.machine.now) - before
        before = self.reading(self.machine.now)
        rows = sum(e.end - e.start for e in entries)
        self.machine.run(self.machine.target(rows + sum(tree.num_nodes - 1 for tree in trees)))
        seconds["target_forward"] = self.reading(self.machine.now) - before
        before = self.reading(self.machine.now)
        self.machine.run(OVERHEAD)
        seconds["commit"] = self.reading(self.machine.now) - before
        outcomes = [self._commit(e, tree) for e, tree in zip(plan.tree_entries, trees, strict=True)]
        for entry in entries:
            if not entry.has_tree:
                self._computed[entry.request.request_id] = entry.end
        self._count_plain(rows, [len(o.committed) for o in outcomes], slowness)
        self.ensemble.observe(StepReport(outcomes, seconds))
        for outcome in outcomes:
            if outcome.finished:
                self._end(outcome.request_id)

    def _entry(self, name: str, text: list[int]) -> PlanEntry:
        computed = self._computed.get(name, 0)
        end = min(len(text), computed + self.chunk)
        whole = end == len(text)
        tokens = text if whole else text[:]
        return plans.entry(
            tokens,
            request_id=name,
            params=PARAMS,
            start=computed,
            end=end,
            max_nodes=self.nodes if whole else 0,
            room=200,
        )

    def _commit(self, entry: PlanEntry, tree: TokenTree) -> Outcome:
        name, node, committed = entry.request.request_id, 0, list[int]()
        while True:
            token = word(entry.end + len(committed))
            committed.append(token)
            child = tree.children()[node].get(token)
            if child is None:
                break
            node = child
        text = self._texts[name]
        self._computed[name] = entry.end + len(committed) - 1
        text.extend(committed)
        self.tokens += len(committed)
        return plans.outcome(*committed, request_id=name, finished=len(text) - self.prompt >= self.length)

    def _count_plain(self, rows: int, committed: Sequence[int], slowness: float) -> None:
        """Add the seconds without proposals: the prompt's rows, and a step for each further token of a
        request.
        """
        requests, target = len(committed), self.without or self.machine.target
        self.plain += slowness * (target(rows) + OVERHEAD)
        if requests:
            more = (sum(committed) - requests) / requests
            self.plain += slowness * more * (target(requests) + OVERHEAD)

    def _end(self, name: str) -> None:
        self._texts.pop(name)
        self._computed.pop(name, None)
        self.ensemble.observe(StepReport([Outcome(name, (), finished=True)]))
