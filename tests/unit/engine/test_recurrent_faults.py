"""Faults and random lives of models with recurrent layers: a fault costs its own request alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specinfer.engine import build
from specinfer.engine.admission import AdmittedRequest
from specinfer.llm import LLM
from specinfer.request import Request
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, assert_idle, engine_of, runner_of
from tests.recurrent import CountingModel, answer, counting
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


def test_a_context_of_few_tokens(hybrid: Tiny, want: list[tuple[int, ...]]) -> None:
    for tokens in (2, 3, 41):
        prompt = [7] if tokens < 9 else PROMPTS[0]
        one, whole = hybrid.llm(["similar"], **HOW, max_context=tokens), hybrid.llm(**HOW)
        found, other = (llm.generate(prompt, PARAMS)[0] for llm in (one, whole))
        assert found.token_ids == other.token_ids[: tokens - len(prompt)]
        assert found.finish_reason == "length"
        assert_idle(one)


GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(20))
def test_every_text_is_that_of_its_states(seed: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, models = random.Random(seed), counting(tiny.tokenizer)
    monkeypatch.setattr(build, "MAX_CHECKPOINTS", chance.choice([2, 3, 8, 256]))
    drafts = chance.choice([[], ["similar"], ["similar", "stranger"]])
    batch, blocks = chance.choice([1, 3, 6]), chance.choice([40, 60, 300])
    llm = models.llm(
        drafts,
        block_size=4,
        kv_cache_memory=(2 * batch * 260 + blocks * 256 + 1024)
        * (1 + len(drafts)),  # bytes of slots, KV, copies
        max_step_tokens=chance.choice([8, 16, 40]),
        max_batch_size=batch,
        lookup=chance.random() < 0.5,
    )
    engine, live, ended = engine_of(llm), list[AdmittedRequest](), 0
    texts = [[chance.randrange(64) for _ in range(60)] for _ in range(3)]
    for number in range(120):
        if chance.random() < 0.35 and len(live) < 10:
            prompt = [*chance.choice(texts)[: chance.randrange(1, 70)], *range(chance.randrange(5))]
            params = replace(GREEDY, max_tokens=chance.randrange(1, 40))
            live.append(engine.admission.admit(Request(str(number), tuple(prompt), params, seed=0)))
            engine.add(live[-1])
        if live and chance.random() < 0.06:
            engine.abort(live.pop(chance.randrange(len(live))).request.request_id)
        if chance.random() < 0.04:
            failing = chance.choice([models.target, models.similar])
            assert isinstance(failing, CountingModel)
            failing.fails = 1
        try:
            engine.step()
        except RuntimeError as error:
            engine.fail(error)
        engine.check_integrity()
        for one in [one for one in live if one.transcript.finished]:
            live.remove(one)
            found, prompt = one.transcript.output(), list(one.request.prompt_token_ids)
            said = answer(prompt, one.request.params.max_tokens)
            assert list(found.token_ids) == said[: len(found.token_ids)]
            assert found.finish_reason == "error" or len(found.token_ids) == len(said)
            texts.append([*prompt, *found.token_ids])
            ended += 1
    assert ended > 4
