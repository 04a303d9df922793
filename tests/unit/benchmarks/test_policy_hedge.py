"""A hedge among arms: what each is credited with, how weights follow it, and one arm by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.replay.recorder import record
from specinfer.replay.replay import Part, counting_policy, play
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import write_trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.drafts.growth import Shape
from tests.unit.benchmarks.conftest import Run
from tests.unit.benchmarks.test_scripts import table

TARGET, DRAFT = CostCurve((1, 64), (1.0, 1.5)), CostCurve((1, 64), (0.2, 0.4))


@pytest.fixture(scope="module")
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("policy_hedge")


@pytest.fixture(scope="module")
def trace(pair: tuple[str, str]) -> Trace:
    llm = LLM(
        pair[0], drafts=(pair[1],), ngram=True, expansion="1,2,1", kv_cache_memory=1 << 24, dtype="float32",
        tree_size="fixed",
    )  # fmt: skip

    def curve(runner: object, *, every_row: bool, **_: object) -> CostCurve:
        return DRAFT if every_row else TARGET

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.replay.recorder.cost_curve", curve)
        params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=i) for i in range(4)]
        prompts = [[7, 8, 9, 7, 8, 20 + i] for i in range(4)]
        requests = [one.request for [one] in llm.intake.prompts(prompts, params)]
        made = record(llm, requests, shapes=[Shape.of(llm.config.speculation)])
    llm.close()
    return made


def parts(trace: Trace) -> list[Part]:
    return [Part([(trace, i) for i in range(len(trace.texts))])]


def test_one_arm_that_hopes_as_the_policy_does_is_the_policy(module: ModuleType, trace: Trace) -> None:
    usual = module.seconds_of(parts(trace), counting_policy(trace, trace.speculation))
    hedge = module.Hedge(trace, (1.0,))
    assert module.seconds_of(parts(trace), hedge.guarded(), inner=hedge) == usual
    # And with arms that hope for nothing and for everything beside it, the texts take other times.
    several = module.Hedge(trace, (1e-9, 1.0, 1e9))
    assert module.seconds_of(parts(trace), several.guarded(), inner=several) != usual
    assert sum(several.weights.drawn) == several.steps


def test_an_arm_without_hope_has_nothing_verified_and_one_of_much_hope_has_more(
    module: ModuleType, trace: Trace
) -> None:
    never, usual, always = (
        play(parts(trace), module.Hedge(trace, (odds,)).guarded()) for odds in (1e-9, 1, 1e9)
    )
    assert never.nodes == 0
    assert 0 < usual.nodes < always.nodes
    assert sum(never.draft_passes.values()) < sum(usual.draft_passes.values())


@pytest.mark.parametrize(
    ("rate", "odds", "found"), [(0.5, 1, 0.5), (0.5, 3, 0.75), (0, 9, 0), (1, 0.1, 1), (0.8, 0.25, 0.5)]
)
def test_odds_are_multiplied(module: ModuleType, rate: float, odds: float, found: float) -> None:
    assert module.scaled(rate, odds) == pytest.approx(found)


def test_weights_follow_the_best_arm_and_a_shift(module: ModuleType) -> None:
    weights = module.Weights([0.0, 0.0], 0.25)
    assert weights.probabilities() == [0.5, 0.5]
    weights.learn([1.0, 0.0])
    ahead = math.exp(0.25) / (1 + math.exp(0.25))
    assert weights.probabilities()[0] == pytest.approx((1 - module.SHARE) * ahead + module.SHARE / 2)
    # No arm is ever given up: after a thousand steps the other one takes over within fifty.
    for _ in range(1000):
        weights.learn([1.0, 0.0])
    assert weights.probabilities()[0] > 0.97
    for _ in range(50):
        weights.learn([0.0, 1.0])
    assert weights.probabilities()[1] > 0.97


def test_regret_against_the_best_sequence_of_arms_is_bounded(module: ModuleType) -> None:
    """Expected credit against that of the best arm of each of four phases, whatever comes."""
    steps, phases, arms = 2000, 4, 5
    weights = module.Weights([0.0] * arms, 0.25)
    lost = 0.0
    for step in range(steps):
        best = (step * phases // steps * 3) % arms
        credits = [1.0 if arm == best else float((step + arm) % 2) for arm in range(arms)]
        lost += 1.0 - sum(p * c for p, c in zip(weights.probabilities(), credits, strict=True))
        weights.learn(credits)
    share, rate = module.SHARE, weights.rate
    switches = phases - 1
    bits = math.log(arms) + switches * math.log(arms / share) - (steps - switches - 1) * math.log(1 - share)
    assert lost <= bits / rate + rate * steps / 8
    assert lost < 0.15 * steps  # an arm by itself, or any mixture that learns nothing, loses 0.3


def test_credits_are_tokens_less_seconds_at_the_price_of_the_step(
    module: ModuleType, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []
    learn = module.Weights.learn
    monkeypatch.setattr(
        module.Weights, "learn", lambda self, credits: (seen.append([*credits]), learn(self, credits))[1]
    )
    hedge = module.Hedge(trace, (1e-9, 1.0, 1e9))
    module.seconds_of(parts(trace), hedge.guarded(), inner=hedge)
    assert len(seen) > 20
    assert all(-1 <= credit <= 1 for credits in seen for credit in credits)
    assert all(credits[1] == 0 for credits in seen)  # the policy's own is what others are compared with
    assert any(credits[0] < 0 for credits in seen)
    assert any(credits[2] < 0 for credits in seen)
    assert {index for index, count in enumerate(hedge.weights.drawn) if count} == {0, 1, 2}


def test_from_traces_to_a_page(module: ModuleType, run: Run, trace: Trace, tmp_path: Path) -> None:
    for name in ("chat-00", "code-00"):
        write_trace(tmp_path / f"{name}.npz", trace)
    files = [str(tmp_path / f"{name}.npz") for name in ("chat-00", "code-00")]
    options: list[Any] = ["--model", "tiny.gguf", "--traces", *files]
    page = run(module, *options)
    rows = table(page)
    assert [row[0] for row in rows] == ["chat", "code", "all in turns", "phases"]
    assert [row[1] for row in rows] == ["4", "4", "8", "8"]
    for row in rows:
        speeds = [float(cell.split()[0]) for cell in row[3:-1]]
        assert speeds[2] == 1.0  # the policy's own hopes
        assert speeds[-1] >= max(speeds[:5])
    assert run(module, *options) == page
