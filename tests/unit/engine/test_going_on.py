"""An answer goes on in another engine, behind the tokens it has: it is the text it would have been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.errors import RequestError
from specinfer.sampling_params import ThinkingBudget
from tests.engines import Tiny, assert_idle, tiny_of

PROMPT = [70, 97, 110, 99, 121, 70, 97, 110]
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


tiny = tiny_of(vocab_size=256, max_context=128, eos_token_id=0)


def answer(
    llm: LLM, params: SamplingParams, prior_output: tuple[int, ...] = (), index: int = 0
) -> list[RequestOutput]:
    """All outputs of one completion."""
    return list(
        llm.loop.stream([llm.intake.completion(PROMPT, params, index=index, prior_output=prior_output)])
    )


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_the_rest_of_the_same_text(tiny: Tiny, case: str) -> None:
    params = SamplingParams(seed=7, max_tokens=40, **CASES[case])
    with tiny.llm(["similar"], lookup=True) as llm:
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
                assert [list(p) for p in rest[-1].logprobs[since:]] == [
                    list(p) for p in last.logprobs[since:]
                ]
        assert_idle(llm)


def test_each_completion_goes_on_with_the_seed_of_its_own(tiny: Tiny) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20)
    with tiny.llm() as llm:
        [group] = llm.generate([PROMPT], params)
        for index, whole in enumerate(group.outputs):
            rest = answer(llm, params, prior_output=whole.token_ids[:5], index=index)
            assert rest[-1].token_ids == whole.token_ids
            assert rest[-1].index == index


def test_tokens_behind_the_end_of_a_text_are_refused(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    with tiny.llm() as llm:
        whole = answer(llm, params)[-1]
        with pytest.raises(
            RequestError, match="prior_output has 10 tokens, and the text ends after 10"
        ) as error:
            llm.intake.completion(PROMPT, params, prior_output=whole.token_ids)
        assert error.value.parameter == "prior_output"
        with pytest.raises(RequestError, match="outside the model's vocabulary"):
            llm.intake.completion(PROMPT, replace(params, max_tokens=20), prior_output=[999])
        assert_idle(llm)
