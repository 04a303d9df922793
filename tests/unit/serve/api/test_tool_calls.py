"""Tools and reasoning through the official client, with a random model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.thorough

HI = [{"role": "user", "content": "Is it warm in Lisbon?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Porto"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
# Random weights would reason forever before a required call; reasoning may start with any blank.
BLANKS = (9, 10, 11, 12, 13, 28, 29, 30, 31, 32, 194, 225, 226, 227)
NO_REASONING = {"bad_words": ["<th"], "logit_bias": {str(byte): -100 for byte in BLANKS}}
TIME = {"type": "function", "function": {"name": "time", "description": "What time it is."}}


def check_call(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert given["city"] in ("Lisbon", "Porto")
        assert given["unit"] in ("C", "F")
        assert len(given) == 2
    else:
        assert (name, given) == ("time", {})


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_required_is_made_and_its_arguments_follow_the_schema(
    client: openai.OpenAI, seed: int
) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
        "max_tokens": 300,
        "extra_body": NO_REASONING,
    }
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    assert not (choice.message.content or "").strip()

    name = arguments = call_id = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.index == 0
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
            call_id += piece.id or ""
        assert "tool_call" not in (chunk.choices[0].delta.content or "")
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert call_id.startswith("call_")
    assert chunk.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_in_a_separate_field(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 60,
        "extra_body": {"regex": "<think>\nhm, let me see\n</think>\n\nYes[.]"},
    }
    if stream:
        answer_message = {"reasoning_content": "", "content": ""}
        for chunk in client.chat.completions.create(**options, stream=True):
            delta = chunk.choices[0].delta.model_dump()
            for name in answer_message:
                answer_message[name] += delta.get(name) or ""
    else:
        answer = client.chat.completions.create(**options)
        answer_message = answer.choices[0].message.model_dump()
        assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    assert answer_message["reasoning_content"] == "hm, let me see"
    assert answer_message["content"] == "Yes."
