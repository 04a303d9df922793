"""The clock, the limits and the refusals of an engine whose target is a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specinfer.engine.steps import Stage
from specinfer.errors import ConfigError, IntegrityError, RequestError, TraceTooSmallError
from specinfer.plan import StepPlan
from specinfer.replay.drafts import CostTable, ReplayClock
from specinfer.replay.engine import PlayedStep, TracedExecutor, path_along
from specinfer.replay.recorder import learned_shape, record, shapes_of
from specinfer.replay.replay import (
    POLICIES,
    Phase,
    mixed,
    play,
    play_without,
    whole,
    with_nodes,
)
from specinfer.replay.trace import Trace
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.growth import LIKELY_NODES, Shape
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.expansion import Expansion
from tests import plans
from tests.engines import Tiny
from tests.unit.replay.conftest import DRAFT, PROMPTS, TARGET, recorded, requests


@pytest.fixture
def trace(tiny: Tiny, made: list[Trace]) -> Trace:
    """A draft's trace; on its clock only passes take time."""
    if not made:
        llm = tiny.llm(drafts=("similar",), expansion=(2, 1, 1))
        made.append(replace(record(llm, requests(llm, PROMPTS, temperature=0, max_tokens=20)), stages={}))
    return made[0]


def test_likely_paths_are_recorded_however_many_there_are() -> None:
    config = SpeculationConfig()
    usual, all_likely = Shape.of(config), learned_shape(config)
    asked = plans.entry([1, 2, 3], params=SamplingParams(temperature=0)).request
    # At each level at most 1 / min_path paths are likely, and each has a few children.
    levels, width = all_likely.depth(asked), all_likely.width(asked, 0)
    assert all_likely.max_nodes(asked) == LIKELY_NODES == round(levels * width / usual.min_path)
    assert (all_likely.min_probability, all_likely.min_path) == (0.0, usual.min_path)


def test_a_path_follows_the_text_as_far_as_both_go() -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 1, 1))
    assert path_along(tree, [9, 1, 3, 5], 1) == (1, 3)
    assert path_along(tree, [9, 1], 1) == (1,)
    assert path_along(tree, [9, 2, 3], 1) == ()
    assert path_along(TokenTree((9,), (-1,)), [9, 2], 1) == ()


def test_steps_take_what_the_curves_say(trace: Trace) -> None:
    steps: list[PlayedStep] = []
    came = play(whole([trace]), SpeculationPolicy(), on_step=steps.append)
    in_decode = [step for step in steps if step.entries and step.entries[0].tree.num_nodes == 7]
    assert in_decode
    for step in in_decode:
        # The root, and the last guess where it came true; then two nodes, and two.
        ways = [float(DRAFT.seconds([rows, 2, 2]).sum()) for rows in (1, 2)]
        assert min(abs(step.seconds["propose"] - way) for way in ways) < 1e-9
        assert step.seconds["target_forward"] == pytest.approx(float(TARGET.seconds([7])[0]))
    assert came.seconds == pytest.approx(sum(sum(step.seconds.values()) for step in steps))
    assert came.draft_passes["0-similar"] >= 3 * len(in_decode)


def test_what_steps_take_besides_their_passes_is_the_traces(trace: Trace) -> None:
    """And goes by on the clock, which is slower where others use the machine."""
    stages = {Stage.SCHEDULE: 0.25, Stage.VERIFY: 0.5, Stage.COMMIT: 0.125, Stage.FORWARD: 9.0}
    usual, longer = (
        play(whole([one]), SpeculationPolicy()) for one in (trace, replace(trace, stages=stages))
    )
    assert longer.passes == usual.passes
    assert longer.seconds == pytest.approx(usual.seconds + usual.passes * 0.875)


def test_a_text_that_was_cut_ends_where_it_was(trace: Trace) -> None:
    text = max(trace.texts, key=lambda text: len(text.output))
    cut = replace(trace, texts=(replace(text, output=text.output[:6]),))
    assert text.params.max_tokens > 6
    for policy in POLICIES:
        assert play(whole([cut]), POLICIES[policy](cut, cut.speculation)).tokens == 6


def test_what_a_trace_does_not_know_of_its_target_is_not_made_up(trace: Trace) -> None:
    text = trace.texts[0].prompt
    executor = TracedExecutor(64, CostTable(TARGET), {}, ReplayClock())
    executor.texts["0"] = (*text, 5, 6)
    tree = TokenTree((text[-1], 9, 5, 6), (-1, 0, 0, 2))
    entry = plans.entry(text, request_id="0")
    flight = executor.launch(StepPlan((entry,)), [tree]).flight()
    assert flight.choices([0, 2], []) == [5, 6]
    for beside in (1, 3):  # no query there: one is no text, and the text ends with the other
        with pytest.raises(KeyError):
            flight.choices([beside], [])
    for ask in (
        lambda: flight.row(0),
        lambda: flight.scores([0], [5], 1),
        lambda: flight.likeliest([0], 1, [1.0]),
    ):
        with pytest.raises(IntegrityError, match="no logits"):
            ask()


def test_without_speculation_every_step_is_a_row(trace: Trace) -> None:
    came = play_without([Phase(whole([trace])[0].texts[-1:])])
    output = len(trace.texts[-1].output)
    assert (came.tokens, came.passes, came.steps, came.nodes) == (output, output, output - 1, 0)
    prompt = float(TARGET.seconds([len(trace.texts[-1].prompt)])[0])
    assert came.seconds == pytest.approx(prompt + (output - 1) * float(TARGET.seconds([1])[0]))


def test_every_way_of_playing_brings_every_token(trace: Trace) -> None:
    for parts in (
        whole([trace, trace], at_once=3),
        mixed([trace, trace]),
        [replace(part, slowdown=2.0) for part in mixed([trace])],
    ):
        came = play(parts, POLICIES["cost"](trace, trace.speculation))
        assert came.tokens == sum(len(t.texts[i].output) for part in parts for t, i in part.texts)


def test_a_busy_machine_takes_as_much_longer_as_is_said(trace: Trace) -> None:
    parts = mixed([trace])
    usual, slow = (play([replace(parts[0], slowdown=by)], SpeculationPolicy()) for by in (1.0, 3.0))
    assert slow.seconds == pytest.approx(3 * usual.seconds)
    assert slow.steps == usual.steps


def test_a_guess_that_was_not_recorded_is_not_made_up(trace: Trace) -> None:
    deepest = shapes_of(trace.speculation)[0].expansion.depth
    for widths, reason in (
        ((1,) * (deepest + 1), f"as deep as {deepest + 1}"),
        ((9,), "of 9 children at depth 0"),
        ((1, 3, 1), "of 3 children at depth 1"),
    ):
        larger = replace(trace.speculation, expansion=Expansion(widths))
        with pytest.raises(TraceTooSmallError, match=f"0-similar was not recorded {reason}.*--expansion"):
            play(whole([trace]), SpeculationPolicy(), speculation=larger)


def test_other_shapes_that_were_recorded_are_played(tiny: Tiny, trace: Trace) -> None:
    """And do what a live engine of that shape does."""
    for widths in ((1,), (4, 2), (2, 1, 1, 1, 1, 1)):
        shaped = replace(trace.speculation, expansion=Expansion(widths))
        came = play(whole([trace], at_once=7), SpeculationPolicy(), speculation=shaped)
        outputs = tiny.llm(drafts=("similar",), expansion=widths).generate(
            PROMPTS, [text.params for text in trace.texts]
        )
        assert came.steps == sum(output.figures.steps for output in outputs)
        assert came.nodes == sum(output.figures.drafted_tokens for output in outputs)


def test_fewer_nodes_are_those_of_a_live_engine(tiny: Tiny, trace: Trace) -> None:
    came = play(whole([trace], at_once=7), SpeculationPolicy(), speculation=with_nodes(trace, 4))
    outputs = tiny.llm(drafts=("similar",), expansion=(2, 1, 1), max_nodes=4).generate(
        PROMPTS, [text.params for text in trace.texts]
    )
    assert came.steps == sum(output.figures.steps for output in outputs)


def test_what_cannot_be_played_or_recorded_is_refused(tiny: Tiny, trace: Trace) -> None:
    other = replace(trace, model="another")
    with pytest.raises(ConfigError, match="of the same"):
        play(whole([trace, other]), SpeculationPolicy())
    with pytest.raises(ConfigError, match="no texts"):
        play([], SpeculationPolicy())
    with pytest.raises(ConfigError, match="1 to 1, the batch size"):
        play([Phase(whole([trace])[0].texts, 0), Phase(whole([trace])[0].texts, 1)], SpeculationPolicy())
    with pytest.raises(ConfigError, match="coupled"):
        recorded(tiny.llm(drafts=("similar",), verifier="mss"))
    with pytest.raises(RequestError, match="frequency_penalty is 0"):
        recorded(tiny.llm(), frequency_penalty=0.5)
    with pytest.raises(RequestError, match="at least one prompt"):
        recorded(tiny.llm(), [])
