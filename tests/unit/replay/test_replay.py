"""Played traces do what live engines do: step by step, tree by tree, number by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from specinfer import SamplingParams
from specinfer.engine.trace import TreeEvent
from specinfer.llm import LLM
from specinfer.replay.engine import PlayedStep
from specinfer.replay.replay import POLICIES, Phase, play, speculation_of, speedup, whole
from specinfer.replay.trace import Trace
from specinfer.tree import TokenTree
from tests.engines import Tiny
from tests.unit.replay.conftest import PROMPTS, recorded

SPECULATIONS: dict[str, dict[str, Any]] = {
    "draft": {"drafts": ("similar",)},
    "two drafts, wide": {"drafts": ("similar", "stranger"), "expansion": (2, 2, 1)},
    "n-grams": {"lookup": True},
    "all": {"drafts": ("similar",), "lookup": True, "max_nodes": 20},
}
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 1.2, "top_k": 5, "top_p": 0.9},
}
Step = list[tuple[str, Any, tuple[int, ...]]]


def contents(tree: TokenTree) -> Any:
    """All of a tree that a policy or a verifier can see."""
    draws = [(d.parent, d.node, d.speculator, d.rule, d.confidence, d.evidence) for d in tree.draws]
    return tree.token_ids, tree.parents, draws


def live(llm: LLM, trace: Trace, speculation: Any = None) -> list[Step]:
    """The steps with trees in which an engine answers the requests of a trace, numbered as these are."""
    events: list[TreeEvent] = []
    llm.on_tree = events.append
    params = [
        replace(text.params, seed=text.seed, prediction=text.prediction or None) for text in trace.texts
    ]
    outputs = llm.generate([text.prompt for text in trace.texts], params)
    llm.on_tree = None
    assert [output.token_ids for output in outputs] == [text.output for text in trace.texts]
    numbers = {output.request_id: str(i) for i, output in enumerate(outputs)}
    steps: dict[int, Step] = {}
    for event in events:
        one = (numbers[event.request_id], contents(event.tree), event.acceptance.path)
        steps.setdefault(event.step, []).append(one)
    return list(steps.values())


def played(trace: Trace, policy: str, batch: int) -> list[Step]:
    steps: list[PlayedStep] = []
    speculation = speculation_of(policy, trace.speculation)
    play(
        [Phase([(trace, i) for i in range(len(trace.texts))], batch)],
        POLICIES[policy](trace, speculation),
        speculation=speculation,
        on_step=steps.append,
    )
    return [
        [(e.request_id, contents(e.tree), e.path) for e in step.entries] for step in steps if step.entries
    ]


def was_predicted(tree: Any, path: Sequence[int]) -> bool:
    """Whether a prediction proposed some of the nodes that became text."""
    _, _, draws = tree
    return any(node in path and speculator == "prediction" for _, node, speculator, *_ in draws)


# Each of them once in every run; all pairs where there is time.
QUICK = [("draft", "sampled"), ("two drafts, wide", "filtered"), ("n-grams", "sampled"), ("all", "greedy")]
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.thorough)
    for pair in product(SPECULATIONS, LAWS)
]


@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_a_replay_is_the_live_run(tiny: Tiny, name: str, law: str) -> None:
    llm = tiny.llm(**SPECULATIONS[name], max_step_tokens=24, max_batch_size=4)
    trace = recorded(llm, **LAWS[law])
    for policy in POLICIES.keys() - {"counts"}:  # which no engine's option asks for
        for batch in (1, 4):
            engine = llm.variant(tree_size=policy, clock="curve", max_batch_size=batch)
            steps = live(engine, trace)
            assert played(trace, policy, batch) == steps
            assert batch > 1 or any(path for step in steps for _, _, path in step)


@pytest.mark.parametrize(("name", "law"), [("draft", "sampled"), ("n-grams", "greedy"), ("all", "filtered")])
def test_with_predictions_of_some_requests_too(tiny: Tiny, name: str, law: str) -> None:
    llm = tiny.llm(**SPECULATIONS[name], max_step_tokens=24, max_batch_size=4)
    answers = [text.output for text in recorded(llm, **LAWS[law]).texts]
    predictions = [answers[0], (*answers[1][:4], 63, *answers[1][5:]), answers[2][7:]]  # and two have none
    trace = recorded(llm, predictions=predictions, **LAWS[law])
    assert [text.prediction for text in trace.texts] == [*predictions, (), ()]
    for policy in POLICIES.keys() - {"counts"}:
        for batch in (1, 4):
            steps = live(llm.variant(tree_size=policy, clock="curve", max_batch_size=batch), trace)
            assert played(trace, policy, batch) == steps
            taken = {number for step in steps for number, *of_tree in step if was_predicted(*of_tree)}
            assert taken == {"0", "1", "2"}


def test_figures_are_those_of_a_live_run(tiny: Tiny) -> None:
    llm = tiny.llm(**SPECULATIONS["all"])
    trace = recorded(llm)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    came = play(whole([trace], at_once=7), POLICIES["fixed"](trace, trace.speculation))
    assert came.tokens == sum(len(output.token_ids) for output in outputs)
    assert came.steps == sum(output.figures.steps for output in outputs)
    assert came.step_tokens == sum(output.figures.output_tokens for output in outputs)
    assert came.nodes == sum(output.figures.drafted_tokens for output in outputs)


def test_texts_are_paired() -> None:
    before = [1.0, 5.0, 2.0, 80.0] * 4
    found = speedup(before, [seconds / 2 for seconds in before])
    # Each text is twice as quick, so the ratio is certain however different the texts are.
    assert (found.ratio, found.low, found.high) == (2.0, pytest.approx(2.0), pytest.approx(2.0))
    assert str(found) == "2.000 [2.000, 2.000]"


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        before = random.uniform(1, 3, 40)
        found = speedup(before.tolist(), (before * random.uniform(0.5, 1.5, 40)).tolist())
        held += found.low < 1.0 < found.high
    assert 180 <= held <= 198  # 190 on average


def test_one_text_has_no_interval() -> None:
    found = speedup([3.0], [2.0])
    assert (found.low, found.ratio, found.high) == (1.5, 1.5, 1.5)
