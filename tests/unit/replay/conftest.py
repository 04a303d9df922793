"""Fixtures of trace tests: tiny models, requests, and fixed costs of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.llm import LLM
from specinfer.replay.recorder import learned_shape, record
from specinfer.replay.trace import Trace
from specinfer.request import Request
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts.growth import Shape
from specinfer.tree.expansion import Expansion
from tests.engines import Tiny, write_tiny

TARGET = CostCurve((1, 5, 9, 64), (1.0, 1.02, 1.6, 20.0))
DRAFT = CostCurve((1, 64), (0.05, 0.2))
# Prompts of several lengths with repetitions: one is longer than a step's rows, two are equal.
PROMPTS = [[*range(i, i + 5)] * 2 for i in range(2)] + [[7, 7, 3] * 9, [7, 7, 3] * 9, [1, 2]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(
        tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=128, eos_token_id=10, spread=0.25
    )


@pytest.fixture(scope="module")
def made() -> list[Trace]:
    """A module's trace, once it is recorded."""
    return []


@pytest.fixture(autouse=True)
def _costs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces measured pass costs by fixed curves, in engines and in traces."""

    def curve(runner: ModelRunner, **_: object) -> CostCurve:
        return TARGET if runner.model is tiny.target else DRAFT

    monkeypatch.setattr("specinfer.runtime.executor.cost_curve", curve)


def requests(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[Request]:
    each = [SamplingParams(**{"seed": 5 + i, **params}) for i in range(len(prompts))]
    return [one.request for [one] in llm.intake.prompts(list(prompts), each)]


def recorded(
    llm: LLM,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    predictions: Sequence[tuple[int, ...]] = (),
    **params: Any,
) -> Trace:
    """Record a trace with the engine's shape and one other, which is faster than with the default shapes.

    `predictions` belong to the first requests.
    """
    each = requests(llm, prompts, **{"temperature": 0, "max_tokens": 20, **params})
    for i, prediction in enumerate(predictions):
        each[i] = replace(each[i], prediction=prediction)
    speculation = llm.config.speculation
    shapes = [Shape(plan, speculation.draw_rule) for plan in (speculation.fixed_expansion, Expansion((3, 1)))]
    if not isinstance(speculation.expansion, Expansion):
        shapes.append(learned_shape(speculation))
    return record(llm, each, shapes=shapes)
