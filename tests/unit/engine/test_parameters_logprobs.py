"""Log-probabilities through engines, of output and prompt: with any speculation they are the oracle's."""

from __future__ import annotations

import math

import pytest

from specinfer import LLM
from specinfer.request import Logprobs
from tests.engines import Tiny
from tests.exact.slow_sampling import logprobs, next_law, processed_logits
from tests.unit.engine.byte_oracle import PARAMS, PROMPTS, SPECULATION, VOCAB, Oracle, params_of, tokens


def reported(row: list[float], chosen: int, top: int) -> dict[int, tuple[float, int]]:
    """Token -> (log-probability, rank): the chosen one, then the likeliest."""
    order = sorted((t for t in range(VOCAB) if row[t] > -math.inf), key=lambda t: (-row[t], t))
    ids = dict.fromkeys([chosen, *order[:top]])
    return {t: (row[t], 1 + sum(x > row[t] for x in row)) for t in ids}


def assert_reports(got: Logprobs | None, expected: dict[int, tuple[float, int]], letters: Tiny) -> None:
    assert list(got) == list(expected)
    for token, (value, rank) in expected.items():
        assert got[token].logprob == pytest.approx(value, abs=1e-5)
        assert (got[token].rank, got[token].text) == (rank, letters.tokenizer.text_of(token))


@pytest.mark.thorough
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_batch_size": 4}])
@pytest.mark.parametrize("speculation", ["none", "both"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize(
    "name", ["nothing", "temperature, filters", "frequency_penalty", "bad_words", "choice"]
)
def test_logprobs_are_the_oracles(
    letters: Tiny, oracle: Oracle, name: str, mode: str, speculation: str, limits: dict[str, int]
) -> None:
    params = params_of(name, logprobs=3, prompt_logprobs=2, logprobs_mode=mode)
    for prompt, output in zip(
        PROMPTS, letters.llm(**{**SPECULATION[speculation], **limits}).generate(PROMPTS, params), strict=True
    ):
        text = (*prompt, *output.token_ids)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            expected = reported(logprobs(oracle.row(text[:i])), text[i], 2)
            assert_reports(output.prompt_logprobs[i], expected, letters)
        assert len(output.logprobs) == len(output.token_ids)
        rules = oracle.rules(prompt, params)
        for i, token in enumerate(output.token_ids):
            row = oracle.row((*prompt, *output.token_ids[:i]))
            if mode == "processed":
                processed = processed_logits(row, rules, output.token_ids[:i])
                if params.greedy:
                    row = logprobs(processed)
                else:
                    law = next_law(row, rules, output.token_ids[:i])
                    row = [math.log(p) if p > 0 else -math.inf for p in law]
            else:
                row = logprobs(row)
            assert_reports(output.logprobs[i], reported(row, token, 3), letters)


@pytest.mark.thorough
def test_asking_for_logprobs_changes_no_text(llms: dict[str, LLM]) -> None:
    for name in PARAMS:
        plain = llms["both"].generate(PROMPTS, params_of(name))
        asked = llms["both"].generate(PROMPTS, params_of(name, logprobs=0, prompt_logprobs=0))
        assert tokens(asked) == tokens(plain)
        assert all(len(found) == 1 for o in asked for found in o.logprobs or ())


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_batch_size": 4}])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored_as_a_plain_pass_scores_it(
    letters: Tiny, oracle: Oracle, max_tokens: int, limits: dict[str, int]
) -> None:
    params = params_of("nothing", max_tokens=max_tokens, prompt_logprobs=1, n=2)
    outputs = letters.llm(**{**SPECULATION["both"], **limits}).generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for one in output.outputs:
            assert len(one.token_ids) == max_tokens
            assert len(one.prompt_logprobs) == len(prompt)
            assert one.prompt_logprobs[0] is None
            for i in range(1, len(prompt)):
                expected = reported(logprobs(oracle.row(tuple(prompt[:i]))), prompt[i], 1)
                assert_reports(one.prompt_logprobs[i], expected, letters)
