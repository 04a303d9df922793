"""Sampling parameters that no token meets, at once or in mid-text: one line, at no other request's cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.errors import RequestError
from specinfer.request import FinishReason
from tests.engines import assert_idle, write_tiny
from tests.unit.engine.byte_oracle import EOS, LENGTH, PROMPTS, SPECULATION, VOCAB, Oracle, params_of


def test_what_cannot_be_served_is_one_line_and_costs_no_other(llms: dict[str, LLM]) -> None:
    for params, says in (
        (
            {"choice": ["no"], "allowed_token_ids": [97, EOS]},
            "choice and allowed_token_ids leave no token to begin with; relax one of them",
        ),
        (
            {"allowed_token_ids": [97], "bad_words": ["a"]},
            "allowed_token_ids and bad_words leave no token to begin with; relax one of them",
        ),
        (
            {"allowed_token_ids": [EOS], "min_tokens": 1},
            "allowed_token_ids and min_tokens leave no token to begin with; relax one of them",
        ),
        (
            {"allowed_token_ids": [97, 128]},
            "allowed_token_ids has token id 128, outside the model's vocabulary of 128 tokens",
        ),
    ):
        llm = llms["both"]
        with pytest.raises(RequestError) as caught:
            llm.generate(PROMPTS[:2], [SamplingParams(), SamplingParams(**params)])
        assert str(caught.value) == says, params
        assert_idle(llm)


def test_a_form_needs_a_model_whose_texts_end(tmp_path: Path) -> None:
    llm = write_tiny(tmp_path, vocab_size=VOCAB).llm()
    with pytest.raises(RequestError, match="choice needs a model with an end-of-text token, which marks"):
        llm.generate(PROMPTS[:2], [SamplingParams(), SamplingParams(choice=["yes"])])
    assert_idle(llm)


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize(
    ("params", "said"),
    [
        # The last letter of the only choice is not allowed.
        ({"choice": ["abc"], "allowed_token_ids": [97, 98, EOS]}, "ab"),
        # The only possible next token would complete a bad word.
        ({"choice": ["abcabcx"], "bad_words": ["cx"]}, "abcabc"),
        # The text is complete, and may not end yet.
        ({"choice": ["aab"], "min_tokens": 5}, "aab"),
    ],
)
def test_a_dead_end_in_mid_text_keeps_what_was_said_and_stops_no_other(
    llms: dict[str, LLM], oracle: Oracle, speculation: str, params: dict[str, Any], said: str
) -> None:
    failing, fine = SamplingParams(seed=1, max_tokens=LENGTH, **params), params_of("all of them")
    prediction = replace(failing, prediction=said + "abc")
    requests = [fine, failing, fine, prediction]
    outputs = llms[speculation].generate([PROMPTS[0]] * 4, requests)
    expected = oracle.text(PROMPTS[0], fine)
    assert [list(output.token_ids) for output in outputs[::2]] == [expected, expected]
    for output in outputs[1::2]:
        assert (output.finish_reason, output.text) == (FinishReason.ERROR, said)
        assert output.error.startswith("choice and ")
        assert f"leave no token to choose after {len(said)} tokens; relax one of them" in output.error
        assert not output.internal_error
    assert_idle(llms[speculation])
