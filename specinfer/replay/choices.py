"""What a policy has chosen while texts were played: who, how deep, how many nodes, and what it brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from specinfer.replay.simulated_engine import PlayedStep


@dataclass(frozen=True, slots=True)
class Chosen:
    """One request's share of one step, its prompt's left out."""

    text: int  # in the order in which they are played
    tokens: int  # that became text, the target's own included
    nodes: int  # verified, below the root
    by: frozenset[str]  # whose guesses were verified
    passes: int  # of drafts, of the step


@dataclass(slots=True)
class Choices:
    """Hears steps (`on_step` of replay.play), and keeps what was chosen in each."""

    steps: list[Chosen] = field(default_factory=list)
    _begun: set[str] = field(default_factory=set)  # requests, whose first step reads their prompts

    def __call__(self, step: PlayedStep) -> None:
        """Keep what was chosen for each request."""
        for entry in step.entries:
            if entry.request_id in self._begun:
                by = frozenset(draw.speculator for draw in entry.tree.draws)
                nodes, passes = entry.tree.num_nodes - 1, sum(step.passes.values())
                self.steps.append(Chosen(int(entry.request_id), len(entry.committed), nodes, by, passes))
            self._begun.add(entry.request_id)


@dataclass(frozen=True, slots=True)
class ChoicesOnAverage:
    """What was chosen over some steps."""

    tokens: float  # a step
    nodes: float
    passes: float
    by: dict[str, float]  # speculator -> the part of the steps in which guesses of its were verified


def on_average(steps: Sequence[Chosen]) -> ChoicesOnAverage:
    """The average over at least one step; speculators by their names."""
    by = Counter(name for step in steps for name in step.by)
    return ChoicesOnAverage(
        fmean(step.tokens for step in steps),
        fmean(step.nodes for step in steps),
        fmean(step.passes for step in steps),
        {name: count / len(steps) for name, count in sorted(by.items())},
    )
