"""A policy that knows the text: what no policy can do better with the same speculators and shapes.

At every place of a text it is known how far each speculator guesses right. So the least time from there to
the end can be computed, from the last place to the first: over who might guess, and how far it is followed.

    least(place) = min over speculators, depths of draft's passes + target's pass + least(place + depth + 1)

Costs are those of a batch whose requests all do the same. What a draft has to read that was not asked for a
while is not counted when the plan is made, but when it is played; a prompt is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specinfer.engine.steps import Stage
from specinfer.plan import PlanEntry, StepPlan
from specinfer.replay.baselines import LookingOn
from specinfer.replay.drafts import CostTable
from specinfer.replay.engine import path_along
from specinfer.replay.replay import Phase, Played, play, play_without
from specinfer.replay.trace import Trace
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.merging import firm_nodes, keep
from specinfer.tree.token_tree import draws_by_parent

Reaches = Mapping[str, int]  # speculator -> how many tokens its own guesses are right, from a root on
_USUAL_ROWS = 2  # of a draft's first pass: the root, and the last guess it had not run


@dataclass(frozen=True, slots=True)
class PlannedGuess:
    """What is done at one place: which draft guesses, if any, and how many nodes are verified."""

    draft: str = ""
    levels: int = 0  # of its tree
    nodes: int = 0  # of the path along the text


class _KnowsTexts(SpeculationPolicy):
    """Knows the text of each request in a step; requests are numbered in the order they are played."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._plan = StepPlan(())

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Remember who is in the step."""
        self._plan = plan
        return plan

    def _path(self, entry: PlanEntry, tree: TokenTree) -> tuple[int, ...]:
        """The nodes of an entry's tree along its text."""
        return path_along(tree, self._texts[int(entry.request.request_id)], entry.end)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Of each tree the last node along its text, if it is one of these ends."""
        paths = [self._path(*pair) for pair in zip(entries, trees, strict=True)]
        return [
            path[-1:] if path and path[-1] in of_tree else ()
            for path, of_tree in zip(paths, ends, strict=True)
        ]


class _Listening(_KnowsTexts, LookingOn):
    """Notes of every place how far each speculator guesses right."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts)
        # Of each text, by tokens before the root.
        self.reaches: list[dict[int, Reaches]] = [{} for _ in texts]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Look at all nodes, and verify none."""
        for entry, tree in zip(self._plan.tree_entries, trees, strict=True):
            number = int(entry.request.request_id)
            self.reaches[number][entry.end] = reaches(tree, self._texts[number], entry.end)
        return super().choose_nodes(trees)


class OraclePolicy(_KnowsTexts):
    """Does at every place what was found to be best."""

    def __init__(self, texts: Sequence[Sequence[int]], choices: Sequence[Mapping[int, PlannedGuess]]) -> None:
        """Of each request, in the order they are played, its text and the choices by tokens before a root."""
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
        """Where its guesses are followed; a prompt is read where they will be."""
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
        """Along the text, as deep as they are followed."""
        along = super().worth_deepening(speculator, entries, trees, ends)
        return [
            nodes if max(tree.depths()) < self._choice(entry).levels else ()
            for entry, tree, nodes in zip(entries, trees, along, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The path along the text; trees with sampled draws stay whole."""
        return [
            tree
            if firm_nodes(tree)
            else keep(tree, sorted((0, *self._path(entry, tree)[: self._choice(entry).nodes])))
            for entry, tree in zip(self._plan.tree_entries, trees, strict=True)
        ]

    def _choice(self, entry: PlanEntry) -> PlannedGuess:
        return self.choices[int(entry.request.request_id)].get(entry.end, PlannedGuess())


def oracle(parts: Sequence[Phase], speculation: SpeculationConfig) -> OraclePolicy:
    """The policy that knows the texts of these parts, to be played in this order and from the start."""
    played = [(trace, number, part.at_once) for part in parts for trace, number in part.texts]
    texts = _texts(parts)
    choices = [
        _best(trace, len(trace.texts[number].prompt), len(text), known, at_once, speculation)
        for (trace, number, at_once), text, known in zip(
            played, texts, reaches_of(parts, speculation), strict=True
        )
    ]
    return OraclePolicy(texts, choices)


def play_oracle(parts: Sequence[Phase], speculation: SpeculationConfig) -> Played:
    """Play parts under the policy that knows their texts, or without speculation where that is quicker.

    The plan takes it that all requests of a batch do the same; where they part, a plan that gains little may
    lose.
    """
    planned = play(parts, oracle(parts, speculation), speculation=speculation, whole_trees=True)
    return min(planned, play_without(parts), key=lambda played: played.seconds)


def reaches_of(
    parts: Sequence[Phase], speculation: SpeculationConfig | None = None
) -> list[dict[int, Reaches]]:
    """How far each speculator guesses right, at every place of the parts' texts by tokens before the root.

    All guess at every place, as `speculation` says, or the traces' own; drafts go on along the text alone.
    """
    listening = _Listening(_texts(parts))
    # In the same parts, as what a speculator knows may depend on which requests have ended.
    play(parts, listening, speculation=speculation, whole_trees=True)
    return listening.reaches


def _texts(parts: Sequence[Phase]) -> list[tuple[int, ...]]:
    """Prompts and outputs, in the order in which they are played."""
    texts = [trace.texts[number] for part in parts for trace, number in part.texts]
    return [text.prompt + text.output for text in texts]


def reaches(tree: TokenTree, text: Sequence[int], end: int) -> Reaches:
    """How far down a tree below `end` tokens of a text each speculator's own draws follow the text."""
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
    known: Mapping[int, Reaches],
    at_once: int,
    speculation: SpeculationConfig,
) -> dict[int, PlannedGuess]:
    """The choices that bring one text to its end in the least time, by tokens before a root.

    A draft that guesses at all has to read the prompt: the best of plans without any, with each, with all.
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
    """Seconds of one request's share of a batch that does the same."""

    at_once: int
    rest: float  # of a step, beside all passes
    target: CostTable
    passes: Mapping[str, Sequence[float]]  # draft -> of trees of 0, 1, ... levels

    @classmethod
    def of(cls, trace: Trace, at_once: int, speculation: SpeculationConfig) -> _Costs:
        """The costs that a trace tells."""
        passes = (Stage.PROPOSE, Stage.FORWARD)
        rest = sum(seconds for stage, seconds in trace.stages.items() if stage not in passes)
        levels = {name: _pass_seconds(trace, name, at_once, speculation) for name in trace.drafts}
        return cls(at_once, rest, CostTable(trace.curve), levels)

    def step(self, spent: float, nodes: int) -> float:
        """A step in which drafts take `spent` seconds and each request has so many nodes verified."""
        return (spent + self.target.seconds(self.at_once * (1 + nodes)) + self.rest) / self.at_once

    def reading(self, trace: Trace, name: str, prompt: int) -> float:
        """Passes in which a draft reads a prompt, chunk by chunk."""
        table, most = CostTable(trace.drafts[name].curve), trace.engine.max_step_tokens
        return sum(table.seconds(min(most, prompt - start)) for start in range(0, prompt, most))


def _plan(
    drafts: Sequence[str], prompt: int, length: int, known: Mapping[int, Reaches], costs: _Costs
) -> tuple[float, dict[int, PlannedGuess]]:
    """The least seconds to a text's end behind its first token, where these drafts may be asked, and how."""
    least = [0.0] * (length + 1)
    choices: dict[int, PlannedGuess] = {}
    for end in range(length - 1, prompt, -1):
        reach = known.get(end, {})
        free = max((right for name, right in reach.items() if name not in costs.passes), default=0)
        ways = [(0.0, PlannedGuess(nodes=nodes)) for nodes in range(free + 1)]
        for name in drafts:
            levels = range(free + 1, reach.get(name, 0) + 1)
            ways += [(costs.passes[name][level], PlannedGuess(name, level, level)) for level in levels]
        found = [
            (costs.step(spent, choice.nodes) + least[min(end + choice.nodes + 1, length)], choice)
            for spent, choice in ways
        ]
        least[end], choices[end] = min(found, key=lambda way: way[0])
    return least[min(prompt + 1, length)], choices


def _pass_seconds(trace: Trace, name: str, at_once: int, speculation: SpeculationConfig) -> list[float]:
    """Seconds of a draft's passes for trees of 0, 1, ... levels, of which the right nodes alone are run."""
    table = CostTable(trace.drafts[name].curve)
    if (head := trace.drafts[name].head) is not None:  # one pass, that reads what the step before has added
        return [0.0, *(table.seconds(at_once * (1 + level)) for level in range(1, 1 + head.depth))]
    first, each = (table.seconds(at_once * rows) for rows in (_USUAL_ROWS, 1))
    return [0.0, *(first + level * each for level in range(speculation.deepest))]
