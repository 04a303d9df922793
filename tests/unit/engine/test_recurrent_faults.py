"""Faults of models with recurrent layers: each costs its own request alone, and no later text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specinfer.llm import LLM
from specinfer.request import Request
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, assert_idle, engine_of, runner_of
from tests.switched import RECURRENT, SWITCHED, switched_tiny

PROMPTS = [[(7 * i) % 61 for i in range(40)], [9, 8, 7, 6, 5, 4], [50, 51, 52, 53] * 3, [7, 7, 7]]
SICK = 2
PARAMS = SamplingParams(temperature=1, seed=2, max_tokens=24, ignore_eos=True)
SPECULATION: list[dict[str, Any]] = [{}, {"drafts": ["similar"]}, {"drafts": ["similar"], "lookup": True}]
HOW = {"block_size": 4, "max_step_tokens": 16, "max_batch_size": 4}


@pytest.fixture(scope="module", params=RECURRENT)
def hybrid(request: pytest.FixtureRequest, tiny: Tiny) -> Tiny:
    return switched_tiny(replace(SWITCHED[request.param], max_context=96), tiny.tokenizer)


@pytest.fixture(scope="module")
def want(hybrid: Tiny) -> list[tuple[int, ...]]:
    return [output.token_ids for output in hybrid.llm(**HOW).generate(PROMPTS, PARAMS)]


def spoil(llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, start: int) -> None:
    """Write NaN into what a slot keeps of the sick text before its first pass at `start` or later."""
    runner = runner_of(llm)
    states, launch, slots = runner.states, runner.launch, list[int]()
    assert states is not None
    memory = states.memory.states_LSF if part == "states" else states.memory.rings_LRNF

    def spoilt(rows: Sequence[Rows], **options: Any) -> Flight:
        for one in rows:
            if one.start == 0 and [*one.token_ids[:4]] == PROMPTS[SICK][:4]:
                slots.append(one.states.slot)
            elif [one.states.slot] == slots and one.start >= start:
                memory[:, slots.pop()] = torch.nan
        return launch(rows, **options)

    monkeypatch.setattr(runner, "launch", spoilt)


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
@pytest.mark.parametrize(("part", "start"), [("states", 16), ("states", 20), ("rings", 16)])
def test_what_is_no_number_in_a_state_ends_its_own_request(
    hybrid: Tiny,
    want: list[tuple[int, ...]],
    speculation: dict[str, Any],
    part: str,
    start: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = hybrid.llm(**HOW, **speculation)
    with monkeypatch.context() as patch:
        spoil(llm, patch, part, start)
        found = llm.generate(PROMPTS, PARAMS)
    for prompt, output, tokens in zip(PROMPTS, found, want, strict=True):
        if output.finish_reason == "error":
            assert prompt == PROMPTS[SICK]
            assert "the largest must be finite" in str(output.error)
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:  # a convolution sees a few tokens back, and only accepted nodes are read again
            assert output.token_ids == tokens
    assert part != "states" or speculation or found[SICK].finish_reason == "error"
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == want
    for said in range(0, 20, 3):  # no checkpoint has them
        params = replace(PARAMS, max_tokens=24 - said)
        [output] = llm.generate([*PROMPTS[SICK], *want[SICK][:said]], params)
        assert output.token_ids == want[SICK][said:]
    assert_idle(llm)


def test_an_interrupted_prompt_is_begun_again_or_gone_on_with(
    hybrid: Tiny, want: list[tuple[int, ...]]
) -> None:
    llm = hybrid.llm(**{**HOW, "max_step_tokens": 12})
    engine = engine_of(llm)
    for steps in range(1, 6):  # each prompt has 40 tokens, and begins in chunks
        engine.add(engine.admission.admit(Request("r", tuple(PROMPTS[0]), PARAMS, seed=2)))
        for _ in range(steps):
            engine.step()
        assert engine.abort("r") is not None
        assert_idle(llm)
        [output] = llm.generate(PROMPTS[1], PARAMS)  # in its slot
        assert output.token_ids == want[1]
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == want


def test_a_context_of_few_tokens(hybrid: Tiny, want: list[tuple[int, ...]]) -> None:
    for tokens in (2, 3, 41):
        prompt = [7] if tokens < 9 else PROMPTS[0]
        one, whole = hybrid.llm(["similar"], **HOW, max_context=tokens), hybrid.llm(**HOW)
        found, other = (llm.generate(prompt, PARAMS)[0] for llm in (one, whole))
        assert found.token_ids == other.token_ids[: tokens - len(prompt)]
        assert found.finish_reason == "length"
        assert_idle(one)
