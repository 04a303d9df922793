"""Sampling parameters that no token meets, at once or in mid-text: one line, at no other request's cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.request import FinishReason
from tests.engines import assert_idle
from tests.unit.engine.byte_oracle import EOS, LENGTH, PROMPTS, SPECULATION, Oracle, params_of


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
