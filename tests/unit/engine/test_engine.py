"""The engine on tiny models: with any speculator, batch, chunk or preemption, the text is the target's."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

import pytest

from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, assert_idle, slow_generate

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41], list(range(5, 45)), [7, 7, 7, 7]]

SPECULATION: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lookup": {"lookup": True},
    "lookup, from two tokens on": {"lookup": True, "lookup_min": 2},
    "similar draft": {"drafts": ["similar"]},
    "stranger": {"drafts": ["stranger"], "expansion": (2, 2, 1)},
    "two drafts and lookup": {"drafts": ["similar", "stranger"], "lookup": True, "expansion": (1, 3, 1, 2)},
    "top-k draft": {"drafts": ["similar"], "draw": "top_k", "expansion": (3, 2)},
    "small budget": {"drafts": ["similar", "stranger"], "expansion": (3, 3, 3), "max_nodes": 6},
}
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=16),
    "T=1": SamplingParams(temperature=1, seed=11, max_tokens=16),
    "T=.7, top_k, top_p": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, max_tokens=16),
    "min_p": SamplingParams(temperature=1.3, min_p=0.05, seed=6, max_tokens=16),
}


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[str, list[list[int]]]:
    return {name: [slow_generate(tiny.target, p, s) for p in PROMPTS] for name, s in SAMPLING.items()}


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert_idle(llm)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("speculation", SPECULATION)
def test_the_text_is_the_targets_alone_and_in_a_batch(
    tiny: Tiny, expected: dict[str, list[list[int]]], speculation: str, sampling: str
) -> None:
    llm = tiny.llm(**SPECULATION[speculation])
    params = SAMPLING[sampling]
    assert run(llm, PROMPTS, params) == expected[sampling]
    assert run(llm, PROMPTS[:1], params) == expected[sampling][:1]


def test_a_draft_that_is_the_target_is_always_right(tiny: Tiny) -> None:
    # Each wrong or stale K or V in the draft's cache would make it guess something else somewhere.
    llm = tiny.llm(drafts=["target"], expansion=(1, 2, 1))
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=41)):
        assert output.figures.steps == 10  # after the first token, ten times 3 + 1
        assert output.figures.accepted_per_depth == [10, 10, 10]
        assert output.figures.accepted_by == {"0-target": 30}


def test_an_interrupt_of_a_caller_leaves_an_llm_that_works(
    tiny: Tiny, expected: dict[str, list[list[int]]]
) -> None:
    llm = tiny.llm(drafts=["similar"], lookup=True)
    steps = count()

    def interrupt(_: object) -> None:
        if next(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    llm.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SAMPLING["T=1"])
    assert_idle(llm)
    assert run(llm, PROMPTS, SAMPLING["T=1"]) == expected["T=1"]
