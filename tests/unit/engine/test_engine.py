"""The engine on tiny models: with any speculator, batch, chunk or preemption, the text is the target's."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from specinfer.errors import RequestError
from specinfer.llm import LLM
from specinfer.request import RequestOutput
from specinfer.runtime import flight as flight_module
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams, ThinkingBudget
from tests.engines import Tiny, assert_idle, slow_generate, tiny_of

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


def test_an_interrupt_leaves_an_llm_that_works(tiny: Tiny, expected: dict[str, list[list[int]]]) -> None:
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


# Answers that go on in another engine: each is the text it would have been.


FANCY = [70, 97, 110, 99, 121, 70, 97, 110]
THINKING = ThinkingBudget(tokens=9, open="<", close=">>>", ending=tuple(b">>>"), started=True)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bias and bans": {"temperature": 1.0, "logit_bias": {65: 3.0}, "bad_words": ["B", "CD"]},
    "stop string": {"temperature": 1.0, "stop": ["zzzz", "Q"], "min_tokens": 20},
    "grammar": {"temperature": 1.0, "regex": "(ab|cd){4,12}[0-9]*"},
    "thinking": {"temperature": 1.0, "thinking": THINKING},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    "no speculation": {"temperature": 1.0, "speculation": False},
    "a prediction": {"temperature": 0.8, "prediction": "Fancy that"},
}


of_bytes = tiny_of(vocab_size=256, max_context=128, eos_token_id=0)


def answer(
    llm: LLM, params: SamplingParams, prior_output: tuple[int, ...] = (), index: int = 0
) -> list[RequestOutput]:
    """All outputs of one completion."""
    return [*llm.loop.stream([llm.intake.completion(FANCY, params, index=index, prior_output=prior_output)])]


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_the_rest_of_the_same_text(of_bytes: Tiny, case: str) -> None:
    params = SamplingParams(seed=7, max_tokens=40, **CASES[case])
    with of_bytes.llm(["similar"], lookup=True) as llm:
        whole = answer(llm, params)
        last = whole[-1]
        assert len(whole) >= 3
        for output in [whole[0], whole[len(whole) // 2], whole[-2]]:
            rest = answer(llm, params, prior_output=output.token_ids)
            assert rest[-1].token_ids == last.token_ids
            assert rest[-1].text == last.text
            assert rest[-1].finish_reason is last.finish_reason
            assert output.text + "".join(one.new_text for one in rest) == last.text
            if params.logprobs is not None:
                since = len(output.token_ids)
                assert [[*p] for p in rest[-1].logprobs[since:]] == [[*p] for p in last.logprobs[since:]]
        assert_idle(llm)


def test_each_completion_goes_on_with_the_seed_of_its_own(of_bytes: Tiny) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20)
    with of_bytes.llm() as llm:
        [group] = llm.generate([FANCY], params)
        for index, whole in enumerate(group.outputs):
            rest = answer(llm, params, prior_output=whole.token_ids[:5], index=index)
            assert rest[-1].token_ids == whole.token_ids
            assert rest[-1].index == index


def test_tokens_behind_the_end_of_a_text_are_refused(of_bytes: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    with of_bytes.llm() as llm:
        whole = answer(llm, params)[-1]
        with pytest.raises(RequestError, match="prior_output has 10 tokens, and the text ends") as error:
            llm.intake.completion(FANCY, params, prior_output=whole.token_ids)
        assert error.value.parameter == "prior_output"
        with pytest.raises(RequestError, match="outside the model's vocabulary"):
            llm.intake.completion(FANCY, replace(params, max_tokens=20), prior_output=[999])
        assert_idle(llm)


# Logits in tiny blocks, few of them in memory: the output is that with full rows.


SOME = [[1, 2, 3, 4, 1, 2, 3], [9], list(range(5, 30)), [7, 7, 7, 7]]
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.95, "seed": 3},
    "processed": {"temperature": 0.9, "presence_penalty": 0.6, "bad_words": [], "min_tokens": 3, "seed": 4},
    "logprobs": {"temperature": 1, "seed": 5, "logprobs": 2, "prompt_logprobs": 1},
}


def said(tiny: Tiny, verifier: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    llm = tiny.llm(["similar", "stranger"], expansion=(3, 2), lookup=True, verifier=verifier)
    outputs: list[RequestOutput] = llm.generate(SOME, SamplingParams(**params, max_tokens=10))
    llm.check_integrity()
    return [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize("verifier", ["coupled", "mss"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_texts_and_logprobs_do_not_depend_on_blocks(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], verifier: str
) -> None:
    want, make = said(tiny, verifier, params), Flight._make
    made: list[int] = []

    def counted(self: Flight, wanted: Any) -> None:
        make(self, wanted)
        made.append(self._count if self._whole is not None else len(self._blocks[-1].rows))

    monkeypatch.setattr(Flight, "_make", torch.inference_mode()(counted))
    monkeypatch.setattr(flight_module, "BLOCK_ROWS", 2)
    monkeypatch.setattr(flight_module, "_MIN_ROWS_BESIDE", 2)
    for most_rows in (1, 3, 20):
        made.clear()
        monkeypatch.setattr(flight_module, "MAX_BYTES", most_rows * 64 * 4)
        assert said(tiny, verifier, params) == want, most_rows
        assert max(made) <= most_rows
        assert len(made) > 16, "many small blocks were made"
