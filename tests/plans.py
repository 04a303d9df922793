"""Step plans and outcomes without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.speculator import Outcome


def entry(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    request_id: str = "r",
    params: SamplingParams | None = None,
    seed: int = 0,
    prediction: Sequence[int] = (),
    rows: int = 1,
    **fields: Any,
) -> PlanEntry:
    """Return a request's entry; the step computes the last `rows` tokens of its text and a tree.

    Its tree may be larger than any test's; `fields` are PlanEntry's. Without an output the entry's text is
    `prompt` itself, not a copy, so that a test may append to it as the engine does.
    """
    text = [*prompt, *output] if output else prompt
    settled: dict[str, Any] = {
        "request": Request(request_id, tuple(prompt), params or SamplingParams(), seed, tuple(prediction)),
        "token_ids": text,
        "start": len(text) - rows,
        "end": len(text),
        "max_nodes": 64,
        "max_depth": 100,
        "block_table": (),
        "generation": 0,
    }
    return PlanEntry(**{**settled, **fields})


def plan(*entries: PlanEntry) -> StepPlan:
    """Return a step plan with these entries."""
    return StepPlan(entries)


def outcome(*committed: int, request_id: str = "r", finished: bool = False) -> Outcome:
    """Return the outcome of a step for one request."""
    return Outcome(request_id, committed, finished)
