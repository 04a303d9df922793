"""The text is the same whatever a pass costs, and the figures are those of the trees that were verified."""

from __future__ import annotations

import random
import time
from queue import SimpleQueue
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.llm import LLM
from specinfer.request import RequestOutput
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.policy.cost_policy import CostPolicy
from tests.engines import Tiny, tiny_of

PROMPTS = [list(range(i, i + 9)) * 2 for i in range(6)]
FREE = CostCurve((1, 1000), (1.0, 1.0))
DEAR = CostCurve((1, 2), (1.0, 2.0))
BENT = CostCurve((1, 7, 8), (1.0, 1.01, 5.0))
# Costs of the target's and of a draft's pass.
CURVES = {
    "rows are free": (FREE, CostCurve((1, 1000), (0.01, 0.01))),
    "rows are dear": (DEAR, CostCurve((1, 1000), (0.01, 0.01))),
    "seven rows are free": (BENT, CostCurve((1, 1000), (0.1, 0.1))),
    "drafts are dear": (BENT, CostCurve((1, 2), (5.0, 9.0))),
}
SPECULATION = {"drafts": ("similar",), "lookup": True, "expansion": (2, 1, 2)}


tiny = tiny_of(vocab_size=32, max_context=128)


def engine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, curves: tuple[CostCurve, CostCurve], **options: Any
) -> LLM:
    def curve(runner: ModelRunner, **_: object) -> CostCurve:
        return curves[runner.model is not tiny.target]

    monkeypatch.setattr("specinfer.engine.costs.cost_curve", curve)
    return tiny.llm(tree_size="cost", **{**SPECULATION, "clock": "curve", **options})


def test_an_idle_engine_measures_what_was_rough(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.engine.costs._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("specinfer.engine.loop._IDLE_SECONDS", 0.01)
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = tiny.llm().generate(PROMPTS, params)
    followed: SimpleQueue[list[bool]] = SimpleQueue()
    follow = CostPolicy.follow

    def noted(policy: CostPolicy, target: CostCurve, drafts: dict[str, CostCurve]) -> None:
        follow(policy, target, drafts)
        followed.put([one.rough for one in (target, *drafts.values())])

    monkeypatch.setattr(CostPolicy, "follow", noted)
    with tiny.llm(tree_size="cost", **SPECULATION) as llm:
        assert texts(llm.generate(PROMPTS, params)) == texts(plain)
        llm._open.engine.rest(lambda: True)  # a request has come
        assert followed.empty()
        llm.loop.rest_when_idle()
        assert followed.get(timeout=20) == [False, False], "target and draft"
        assert texts(llm.generate(PROMPTS, params)) == texts(plain)
    monkeypatch.setattr("specinfer.engine.costs.measure_curves", lambda *_: 1 / 0)
    with tiny.llm(tree_size="cost", **SPECULATION) as llm:
        llm.loop.rest()
        assert not llm._open.engine.has_postponed, "a failure is not repeated"


def texts(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.thorough
@pytest.mark.parametrize("expansion", [(2, 1, 2), "learned"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, frequency_penalty=0.5, max_tokens=40),
    ],
    ids=["greedy", "sampled", "processed"],
)
def test_the_text_is_the_same_whatever_a_pass_costs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, expansion: Any
) -> None:
    plain = tiny.llm().generate(PROMPTS, params)
    nodes: set[int] = set()
    for curves in CURVES.values():
        llm = engine(tiny, monkeypatch, curves, expansion=expansion)
        outputs = llm.generate(PROMPTS, params)
        llm.check_integrity()
        assert texts(outputs) == texts(plain)
        nodes.add(sum(output.figures.drafted_tokens for output in outputs))
    assert len(nodes) > 2, "the trees had different sizes"
    if expansion != "learned":
        fixed = tiny.llm(**SPECULATION).generate(PROMPTS, params)
        assert texts(fixed) == texts(plain)
        assert max(nodes) <= sum(output.figures.drafted_tokens for output in fixed)


def test_where_nothing_pays_the_draft_is_hardly_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(tiny, monkeypatch, CURVES["drafts are dear"], lookup=False)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60))
    steps = sum(output.figures.steps for output in outputs)
    assert steps > 300
    assert sum(output.figures.drafted_tokens for output in outputs) < 6


@pytest.mark.parametrize("wishes", [{"expansion": "2,1"}, {"max_nodes": 5}])
def test_a_request_has_its_size(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, Any]) -> None:
    llm = engine(tiny, monkeypatch, CURVES["drafts are dear"], lookup=False)
    asking = SamplingParams(temperature=0, max_tokens=20, speculation=wishes)
    drafted = [
        output.figures.drafted_tokens / output.figures.steps
        for output in llm.generate(PROMPTS[:2], [asking, SamplingParams(temperature=0, max_tokens=20)])
    ]
    assert drafted[0] > 3.5
    assert drafted[1] < 0.5


def test_multi_step_sampling_keeps_what_was_drawn(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=40)
    widths: set[int] = set()
    for curves in CURVES.values():
        llm = engine(tiny, monkeypatch, curves, lookup=False, verifier="mss")
        llm.on_tree = lambda event: widths.add(event.tree.parents.count(0))
        for output in llm.generate(PROMPTS, params):
            assert len(output.token_ids) == 40
            assert output.error is None
    # Draws without replacement: two children, or none. One alone would have lost its sister for her value.
    assert widths == {0, 2}


class Erratic:
    """A clock that says anything, and the same after the same seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def __call__(self) -> float:
        return self._chance.uniform(0, 1000)


@pytest.mark.parametrize("curves", ["seven rows are free", "rows are dear"])
def test_multi_step_texts_come_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, curves: str) -> None:
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=60)
    runs: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = []
    for seed in range(2):
        llm = engine(tiny, monkeypatch, CURVES[curves], verifier="mss")
        trees: list[tuple[int, ...]] = []
        llm.on_tree = lambda event, trees=trees: trees.append(event.tree.token_ids)  # type: ignore[misc]
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", Erratic(seed))
            runs.append((texts(llm.generate(PROMPTS, params)), trees))
    assert runs[0] == runs[1]
    assert any(len(tree) > 1 for tree in runs[0][1]) is (curves != "rows are dear")


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(3))
def test_the_text_does_not_depend_on_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60)
    llm = engine(tiny, monkeypatch, CURVES["rows are free"], clock="measured")
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", Erratic(seed))
        outputs = llm.generate(PROMPTS, params)
    assert texts(outputs) == texts(tiny.llm().generate(PROMPTS, params))
    llm.check_integrity()
