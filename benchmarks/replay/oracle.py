"""The oracle policy, which knows the text: an upper bound for policies with the same speculators and
shapes.

At every position the recorded number of correct tokens of each speculator is known. So dynamic programming
from the last position to the first finds the fastest plan over speculators and depths:

    fastest(i) = min over speculators, depths of draft's passes + target's pass + fastest(i + depth + 1)

Costs assume that all requests of a batch do the same. A plan ignores rows that an idle draft has to read
later, though playing it charges them; it includes prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.replay.baselines import RootsOnly
from benchmarks.replay.drafts import CostTable
from benchmarks.replay.engine import path_along
from benchmarks.replay.replay import Phase, Played, play, play_without
from benchmarks.replay.trace import Trace
from specinfer.engine.steps import Stage
from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.merging import keep, pinned_nodes
from specinfer.tree.token_tree import draws_by_parent

CorrectCounts = Mapping[str, int]  # speculator -> number of correct tokens that it proposes below a root
_USUAL_ROWS = 2  # rows of a draft's first pass: the root and the last proposed token, which it has not run


@dataclass(frozen=True, slots=True)
class PlannedGuess:
    """The plan at one position: the draft that runs, if any, and the number of verified nodes."""

    draft: str = ""
    levels: int = 0  # levels of the draft's tree
    nodes: int = 0  # nodes of the path along the text


class _TextPolicy(SpeculationPolicy):
    """Has the text of each request; requests are numbered in order of play."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._plan = StepPlan(())

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Remember the step's requests."""
        self._plan = plan
        return plan

    def _path(self, entry: PlanEntry, tree: TokenTree) -> tuple[int, ...]:
        """Return the path of an entry's tree along its text."""
        return path_along(tree, self._texts[int(entry.request.request_id)], entry.end)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Return each tree's last node along its text, if it is an open leaf."""
        paths = [self._path(*pair) for pair in zip(entries, trees, strict=True)]
        return [
            path[-1:] if path and path[-1] in of_tree else ()
            for path, of_tree in zip(paths, ends, strict=True)
        ]


class _CorrectRecorder(_TextPolicy, RootsOnly):
    """Records at every position how many tokens of each speculator are correct."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts)
        # one mapping per text, by tokens before the root
        self.correct: list[dict[int, CorrectCounts]] = [{} for _ in texts]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Examine all nodes and verify none."""
        for entry, tree in zip(self._plan.tree_entries, trees, strict=True):
            number = int(entry.request.request_id)
            self.correct[number][entry.end] = count_correct(tree, self._texts[number], entry.end)
        return super().choose_nodes(trees)


class OraclePolicy(_TextPolicy):
    """Follows the fastest plan at every position."""

    def __init__(self, texts: Sequence[Sequence[int]], choices: Sequence[Mapping[int, PlannedGuess]]) -> None:
        """`texts` in order of play, and each one's plan by tokens before a root."""
        super().__init__(texts)
        self.choices = choices
        self._used = [{choice.draft for choice in of_text.values()} for of_text in choices]

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """Return True if the plan uses the draft; it reads a prompt if the plan uses it later."""
        return [
            self._choice(entry).draft == speculator
            if entry.max_nodes > 1
            else speculator in self._used[int(entry.request.request_id)]
            for entry in entries
        ]

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Return the open leaves along the text, down to the planned depth."""
        continued = super().worth_deepening(speculator, entries, trees, ends)
        return [
            nodes if max(tree.depths()) < self._choice(entry).levels else ()
            for entry, tree, nodes in zip(entries, trees, continued, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the paths along the text; trees with sampled draws stay whole."""
        return [
            tree
            if pinned_nodes(tree)
            else keep(tree, sorted((0, *self._path(entry, tree)[: self._choice(entry).nodes])))
            for entry, tree in zip(self._plan.tree_entries, trees, strict=True)
        ]

    def _choice(self, entry: PlanEntry) -> PlannedGuess:
        return self.choices[int(entry.request.request_id)].get(entry.end, PlannedGuess())


def oracle(parts: Sequence[Phase], speculation: SpeculationConfig) -> OraclePolicy:
    """Return the oracle policy for these parts, to be played in this order and from the start."""
    played = [(trace, number, part.at_once) for part in parts for trace, number in part.texts]
    texts = _texts(parts)
    choices = [
        _best(trace, len(trace.texts[number].prompt), len(text), known, at_once, speculation)
        for (trace, number, at_once), text, known in zip(
            played, texts, correct_counts(parts, speculation), strict=True
        )
    ]
    return OraclePolicy(texts, choices)


def play_oracle(parts: Sequence[Phase], speculation: SpeculationConfig) -> Played:
    """Play parts under the oracle policy, or without speculation if that is faster.

    The plan assumes that all requests of a batch do the same; otherwise a plan with a small gain may lose.
    """
    planned = play(parts, oracle(parts, speculation), speculation=speculation, whole_trees=True)
    return min(planned, play_without(parts), key=lambda played: played.seconds)


def correct_counts(
    parts: Sequence[Phase], speculation: SpeculationConfig | None = None
) -> list[dict[int, CorrectCounts]]:
    """Return each speculator's number of correct tokens at every position, by tokens before the root.

    All speculators propose at every position, with `speculation` or the traces' own; drafts only continue
    along the text.
    """
    recorder = _CorrectRecorder(_texts(parts))
    # Parts stay the same, as a speculator's lookups may depend on the finished requests.
    play(parts, recorder, speculation=speculation, whole_trees=True)
    return recorder.correct


def _texts(parts: Sequence[Phase]) -> list[tuple[int, ...]]:
    """Return prompts with outputs, in order of play."""
    texts = [trace.texts[number] for part in parts for trace, number in part.texts]
    return [text.prompt + text.output for text in texts]


def count_correct(tree: TokenTree, text: Sequence[int], end: int) -> CorrectCounts:
    """Return how deep each speculator's own draws follow the text below `end` of its tokens."""
    found: dict[str, int] = {}
    below = draws_by_parent(tree.draws)
    parent = 0
    for depth, node in enumerate(path_along(tree, text, end)):
        for draw in below[parent]:
            if draw.node == node and found.get(draw.speculator, 0) == depth:
                found[draw.speculator] = depth + 1
        parent = node
    return found


def _best(
    trace: Trace,
    prompt: int,
    length: int,
    known: Mapping[int, CorrectCounts],
    at_once: int,
    speculation: SpeculationConfig,
) -> dict[int, PlannedGuess]:
    """Return the plan that finishes a text in the least time, by tokens before the root.

    A draft in the plan must read the prompt: compares plans with no draft, with each draft and with all
    drafts.
    """
    costs = _Costs.of(trace, at_once, speculation)
    drafts = tuple(trace.drafts)
    allowed = {(), *((name,) for name in drafts), drafts}
    plans = []
    for names in sorted(allowed):
        seconds, choices = _plan(names, prompt, length, known, costs)
        reading = sum(costs.reading(trace, name, prompt) for name in names)
        plans.append((seconds + reading, choices))
    return min(plans, key=lambda plan: plan[0])[1]


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds of one request's share of a batch whose requests all do the same."""

    at_once: int
    rest: float  # seconds of a step without its passes
    target: CostTable
    passes: Mapping[str, Sequence[float]]  # draft -> seconds of trees of 0, 1, ... levels

    @classmethod
    def of(cls, trace: Trace, at_once: int, speculation: SpeculationConfig) -> _Costs:
        """Return the costs of a trace."""
        passes = (Stage.PROPOSE, Stage.FORWARD)
        rest = sum(seconds for stage, seconds in trace.stages.items() if stage not in passes)
        levels = {name: _pass_seconds(trace, name, at_once, speculation) for name in trace.drafts}
        return cls(at_once, rest, CostTable(trace.curve), levels)

    def step(self, spent: float, nodes: int) -> float:
        """Return the seconds of a step with `spent` seconds of draft passes and `nodes` verified nodes per
        request.
        """
        return (spent + self.target.seconds(self.at_once * (1 + nodes)) + self.rest) / self.at_once

    def reading(self, trace: Trace, name: str, prompt: int) -> float:
        """Return the seconds of a draft's passes over a prompt, chunk by chunk."""
        table, rows = CostTable(trace.drafts[name].curve), trace.engine.max_step_tokens
        return sum(table.seconds(min(rows, prompt - start)) for start in range(0, prompt, rows))


def _plan(
    drafts: Sequence[str], prompt: int, length: int, known: Mapping[int, CorrectCounts], costs: _Costs
) -> tuple[float, dict[int, PlannedGuess]]:
    """Return the least seconds from a text's first output token to its end with these drafts, and the
    plan.
    """
    fastest = [0.0] * (length + 1)
    choices: dict[int, PlannedGuess] = {}
    for end in range(length - 1, prompt, -1):
        correct = known.get(end, {})
        free = max((right for name, right in correct.items() if name not in costs.passes), default=0)
        options = [(0.0, PlannedGuess(nodes=nodes)) for nodes in range(free + 1)]
        for name in drafts:
            levels = range(free + 1, correct.get(name, 0) + 1)
            options += [(costs.passes[name][level], PlannedGuess(name, level, level)) for level in levels]
        found = [
            (costs.step(spent, choice.nodes) + fastest[min(end + choice.nodes + 1, length)], choice)
            for spent, choice in options
        ]
        fastest[end], choices[end] = min(found, key=lambda option: option[0])
    return fastest[min(prompt + 1, length)], choices


def _pass_seconds(trace: Trace, name: str, at_once: int, speculation: SpeculationConfig) -> list[float]:
    """Return the seconds of a draft's passes for trees of 0, 1, ... levels that follow the text."""
    table = CostTable(trace.drafts[name].curve)
    if (head := trace.drafts[name].head) is not None:  # one pass, which also reads the last step's tokens
        return [0.0, *(table.seconds(at_once * (1 + level)) for level in range(1, 1 + head.depth))]
    first, each = (table.seconds(at_once * rows) for rows in (_USUAL_ROWS, 1))
    return [0.0, *(first + level * each for level in range(speculation.deepest))]
