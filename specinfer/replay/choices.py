"""A policy's choices during a replay, as figures and as a picture: speculators, depth, nodes, tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from specinfer.replay.engine import PlayedStep
from specinfer.report.files import COLOURS, INK, QUIET, check_plot, dress, new_figure, save

_POINTS: Final = 60  # points per line; each averages over an equal number of tokens


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


def draw_choices(steps: Sequence[StepChoice], kinds: Sequence[str], path: Path) -> None:
    """Write the picture of `steps` to `path`; `kinds` has the kind of each text, in order.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    check_plot(path)
    figure = new_figure(9, 5.4, dpi=80)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    places, averages = averages_along(steps, _POINTS)
    names = sorted({name for one in averages for name in one.by})
    for name, colour in zip(names, COLOURS, strict=False):
        parts = [100 * one.by.get(name, 0.0) for one in averages]
        top.plot(places, parts, color=colour, label=name, linewidth=1.6)
    middle.plot(places, [one.nodes for one in averages], color=COLOURS[0], label="nodes verified")
    if any(one.passes for one in averages):
        middle.plot(places, [one.passes for one in averages], color=COLOURS[1], label="passes of drafts")
    bottom.plot(places, [one.tokens for one in averages], color=COLOURS[2], label="tokens")
    dress(top, "", "", "% of steps with\nguesses verified")
    dress(middle, "", "", "a step")
    dress(bottom, "", "tokens of the texts", "tokens a step")
    for axes in (top, middle, bottom):
        axes.set_ylim(0, None)
    _phases((top, middle, bottom), steps, kinds)
    for axes in (top, middle):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def averages_along(steps: Sequence[StepChoice], points: int) -> tuple[list[float], list[MeanChoices]]:
    """Average over at most `points` segments of equal numbers of tokens; return middles and averages."""
    ends = np.cumsum([step.tokens for step in steps])
    segment = np.minimum(points - 1, (ends - 1) * points // max(1, ends[-1]))
    places, averages = list[float](), list[MeanChoices]()
    for _, of_segment in groupby(range(len(steps)), key=lambda i: int(segment[i])):
        numbers = [*of_segment]
        places.append(float(ends[numbers].mean()))
        averages.append(mean_choices([steps[i] for i in numbers]))
    return places, averages


def _phases(all_axes: Sequence[Any], steps: Sequence[StepChoice], kinds: Sequence[str]) -> None:
    """Draw a line where the kind of text changes, and the kinds' names above the first axes."""
    begins = 0
    for kind, of_kind in groupby(steps, key=lambda step: kinds[step.text]):
        tokens = sum(step.tokens for step in of_kind)
        for axes in all_axes if begins else ():
            axes.axvline(begins, color=QUIET, linewidth=0.8)
        all_axes[0].text(
            begins + tokens / 2,
            1.02,
            kind,
            transform=all_axes[0].get_xaxis_transform(),
            ha="center",
            color=INK,
            fontsize=9,
        )
        begins += tokens
