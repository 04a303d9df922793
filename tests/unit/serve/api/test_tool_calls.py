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


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "reply",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"warm": {"type": "boolean"}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["warm", "n"],
            "additionalProperties": False,
        },
    },
}


def check_form(text: str) -> None:
    reply = json.loads(text)
    assert isinstance(reply["warm"], bool)
    assert reply["n"] in range(1, 10)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_beside_a_form_an_answer_is_a_call_or_the_form(
    client: openai.OpenAI, called: bool, stream: bool
) -> None:
    first = {str(ord("<")): 100 if called else -100}  # how a call begins
    held = {**NO_REASONING, "logit_bias": NO_REASONING["logit_bias"] | first}
    options: dict[str, Any] = {
        **{"model": "tiny", "messages": HI, "tools": [WEATHER, TIME], "response_format": FORM, "seed": 1},
        **{"max_tokens": 300, "parallel_tool_calls": False, "extra_body": held},
    }
    if stream:
        content = name = arguments = ""
        for chunk in client.chat.completions.create(**options, stream=True):
            content += chunk.choices[0].delta.content or ""
            for piece in chunk.choices[0].delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    else:
        [choice] = client.chat.completions.create(**options).choices
        content, reason = choice.message.content or "", choice.finish_reason
        calls = choice.message.tool_calls or []
        name = "".join(call.function.name for call in calls)
        arguments = "".join(call.function.arguments for call in calls)
    if called:
        check_call(name, arguments)
        assert (content, reason) == ("", "tool_calls")
    else:
        check_form(content)
        assert (name, reason) == ("", "stop")


def test_a_named_tool_is_called_and_its_result_is_accepted(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=[WEATHER, TIME],
        tool_choice=named,
        max_tokens=300,
        extra_body=NO_REASONING,
    ).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name == "weather"
    reply = [*HI, answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "21 C"}]
    after = client.chat.completions.create(
        model="tiny", messages=reply, tools=[WEATHER], tool_choice="none", max_tokens=5
    )
    assert after.choices[0].message.tool_calls is None


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


def test_responses_have_calls_and_reasoning_as_items(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    answer = client.responses.create(
        model="tiny",
        input=HI,  # type: ignore[arg-type]
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body=NO_REASONING | {"seed": 1},
    )
    [call] = answer.output
    assert call.type == "function_call"
    check_call(call.name, call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 C"}
    after = client.responses.create(
        model="tiny",
        input=[result],
        previous_response_id=answer.id,
        extra_body={"regex": "<think>\nhm\n</think>\n\nYes[.]"},
    )
    assert [item.type for item in after.output] == ["reasoning", "message"]
    assert after.output_text == "Yes."
