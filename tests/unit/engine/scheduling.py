"""Schedulers, sequences and step plans without a model."""

from __future__ import annotations

from typing import cast

from specinfer.engine.kv_blocks import BlockPool, SequenceState
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.state_slots import StateSlots
from specinfer.plan import StepPlan
from specinfer.request import Request
from specinfer.sampling_params import SamplingParams
from specinfer.scheduler_config import SchedulerConfig


def scheduler(
    *,
    rows: int = 32,
    batch: int = 4,
    blocks: int = 100,
    tree: int = 5,
    context: int = 1000,
    states: StateSlots | None = None,
) -> Scheduler:
    config = SchedulerConfig(max_step_tokens=rows, max_batch_size=batch)
    pool = BlockPool(blocks, block_size=4)
    return Scheduler(config, pool, tree_nodes=tree, max_context=context, states=states)


def sequence(name: str, prompt: int, max_tokens: int = 100) -> SequenceState:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    first = 1000 * ord(name)  # no two begin alike; test_prefix_reuse.py has those that do
    return of(Request(name, tuple(range(first, first + prompt)), params, seed=0))


def of(request: Request) -> SequenceState:
    return SequenceState(request, list(request.prompt_token_ids))


def add(s: Scheduler, *states: SequenceState) -> None:
    for state in states:
        s.add(state)


def shares(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    """(request, first token, one past the last, tree nodes) of each entry."""
    return [(e.request.request_id, e.start, e.end, e.max_nodes) for e in plan.entries]


def commit(plan: StepPlan, sequences: list[SequenceState], accepted: int = 0) -> None:
    """Update sequences like the engine after a step that accepts `accepted` tokens of every tree."""
    by_id = {s.request.request_id: s for s in sequences}
    for entry in plan.entries:
        state = by_id[entry.request.request_id]
        state.computed = entry.end
        if entry.has_tree:
            accepts = min(accepted, entry.max_nodes - 1)
            cast(list[int], state.token_ids).extend([0] * (accepts + 1))
            state.computed += accepts
