"""Step plans without an engine: what a speculator is asked, and what it learns of a step."""

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
    """A request that has said `output` so far, `rows` tokens of which this step computes, and then a tree.

    Its tree has room for much more than a test proposes; `fields` are `PlanEntry`'s. Without an output the
    text is `prompt` itself, no copy: a test may let it grow, as the engine does.
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
        "incarnation": 0,
    }
    return PlanEntry(**{**settled, **fields})


def plan(*entries: PlanEntry) -> StepPlan:
    """The step these requests run in."""
    return StepPlan(entries)


def outcome(*committed: int, request_id: str = "r", finished: bool = False) -> Outcome:
    """What a step added to a request."""
    return Outcome(request_id, committed, finished)
