"""Choices over time, as figures and as a plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.replay.choices import Choices, StepChoice, averages_along, draw_choices, mean_choices
from specinfer.replay.replay import POLICIES, play, whole
from specinfer.replay.trace import Trace
from tests.engines import Tiny
from tests.unit.replay.conftest import recorded


@pytest.fixture
def trace(tiny: Tiny) -> Trace:
    return recorded(tiny.llm(drafts=("similar",), lookup=True, expansion=(2, 1, 1)), max_tokens=24)


def chosen(text: int, tokens: int, nodes: int, *by: str, passes: int = 0) -> StepChoice:
    return StepChoice(text, tokens, nodes, frozenset(by), passes)


def test_an_average_over_steps() -> None:
    found = mean_choices([chosen(0, 1, 0), chosen(0, 4, 6, "a", "b", passes=3), chosen(1, 1, 3, "a")])
    assert (found.tokens, found.nodes, found.passes) == (2.0, 3.0, 1.0)
    assert found.by == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}


@pytest.mark.parametrize("batch", [1, 3])
def test_every_step_is_heard_but_those_that_read_prompts(trace: Trace, batch: int) -> None:
    choices = Choices()
    parts = whole([trace], batch)
    played = play(parts, POLICIES["fixed"](trace, trace.speculation), on_step=choices)
    assert len(choices.steps) == played.steps
    assert sum(step.tokens for step in choices.steps) == played.step_tokens
    assert sum(step.nodes for step in choices.steps) == played.nodes
    assert {step.text for step in choices.steps} == set(range(len(trace.texts)))
    assert {name for step in choices.steps for name in step.by} == {*trace.drafts, "lookup"}


def test_seconds_of_texts_add_up(trace: Trace) -> None:
    for batch in (1, 4):
        played = play(whole([trace], batch), POLICIES["fixed"](trace, trace.speculation))
        assert sum(played.of_texts) == pytest.approx(played.seconds)
        assert min(played.of_texts) > 0


def test_stretches_have_about_as_many_tokens() -> None:
    steps = [chosen(0, 2, 1)] * 30 + [chosen(1, 10, 5)] * 6
    places, averages = averages_along(steps, 4)
    assert [one.tokens for one in averages] == [2, 2, 10, 10]
    assert places == [16, 46, 80, 110]  # 30 tokens each: the mean of their steps' ends


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_of_phases(tmp_path: Path, suffix: str) -> None:
    steps = [chosen(0, 1, 0)] * 20 + [chosen(1, 4, 7, "lookup", "draft", passes=2)] * 20
    path = tmp_path / f"choices{suffix}"
    draw_choices(steps, ["chat", "edits"], path)
    assert path.stat().st_size > 5000
