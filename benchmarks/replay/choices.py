"""A policy's choices during a replay: speculators, nodes, tokens and passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.replay.engine import PlayedStep


@dataclass(frozen=True, slots=True)
class StepChoice:
    """One request's share of one step, except steps that read its prompt."""

    text: int  # index, in order of play
    tokens: int  # committed tokens, bonus token included
    nodes: int  # verified nodes, root excluded
    by: frozenset[str]  # speculators with verified nodes
    passes: int  # draft passes of the step


@dataclass(slots=True)
class Choices:
    """Collects the choices of each step; used as `on_step` of replay.play."""

    steps: list[StepChoice] = field(default_factory=list)
    _started: set[str] = field(default_factory=set)  # requests after their first step, which reads the prompt

    def __call__(self, step: PlayedStep) -> None:
        """Record the choices for each request."""
        for entry in step.entries:
            if entry.request_id in self._started:
                by = frozenset(draw.speculator for draw in entry.tree.draws)
                nodes, passes = entry.tree.num_nodes - 1, sum(step.passes.values())
                self.steps.append(StepChoice(int(entry.request_id), len(entry.committed), nodes, by, passes))
            self._started.add(entry.request_id)


@dataclass(frozen=True, slots=True)
class MeanChoices:
    """Mean choices over some steps."""

    tokens: float  # per step
    nodes: float
    passes: float
    by: dict[str, float]  # speculator -> share of the steps in which nodes of it were verified


def mean_choices(steps: Sequence[StepChoice]) -> MeanChoices:
    """Average over at least one step; speculators sorted by name."""
    by = Counter(name for step in steps for name in step.by)
    return MeanChoices(
        fmean(step.tokens for step in steps),
        fmean(step.nodes for step in steps),
        fmean(step.passes for step in steps),
        {name: count / len(steps) for name, count in sorted(by.items())},
    )
