"""Reasoning and tool calls as items of a response."""

from typing import Any

import pytest
from openai.types.responses import Response

from specinfer.request import FinishReason
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import says
from tests.unit.serve.api.servers import OSLO, PLACE, ROME, TEMPLATE, ResponsesServer, call, item  # noqa: F401 - `tokenizer` reads it

WEATHER: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}
WEATHER |= {"description": "What it is like."}
TIME: Any = {"type": "function", "name": "time", "parameters": None, "strict": False}
CALL = call("weather", ROME)


def test_a_call_is_a_separate_item(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says(f"<think>Hm.</think>Let me see.\n{CALL}"))
    answer = server.create("Rain?", tools=[WEATHER, TIME], parallel_tool_calls=False)
    reply = answer.model_dump()
    Response.model_validate(reply)
    thoughts, message, called = answer.output
    assert (thoughts.type, message.type, called.type) == ("reasoning", "message", "function_call")
    assert answer.output_text == "Let me see."
    assert (called.name, called.arguments, called.status) == ("weather", ROME, "completed")  # type: ignore[union-attr]
    assert called.call_id.startswith("call_")  # type: ignore[union-attr]
    assert [tool.to_dict() for tool in answer.tools] == [WEATHER, TIME | {"description": None}]
    assert (reply["tool_choice"], reply["parallel_tool_calls"]) == ("auto", False)
    assert server.prompts[0].endswith("]\nuser: Rain?\nassistant: ")
    assert '"city"' in server.form()


def test_calls_are_streamed_piece_by_piece(tokenizer: Tokenizer) -> None:
    begin = '<tool_call>\n{"name": "weather", "arguments": '
    pieces = (begin, '{"city"', ': "Rome"}', "}\n</tool_call>\n", call("weather", OSLO))
    server = ResponsesServer(tokenizer, says(*pieces))
    events, types = server.stream(input="Rain?", tools=[WEATHER])
    called = "function_call_arguments"
    assert types == ["created", "in_progress", *item(called, 2), *item(called, 1), "completed"]
    assert [one["delta"] for one in events if "delta" in one] == ['{"city"', ': "Rome"}', OSLO]
    first, second = events[-1]["response"]["output"]
    assert (events[6]["item"], events[10]["item"]) == (first, second)
    assert events[2]["item"] == first | {"arguments": "", "status": "in_progress"}
    assert [one["output_index"] for one in events[2:-1]] == [0] * 5 + [1] * 4
    assert (events[5]["arguments"], events[9]["arguments"]) == (ROME, OSLO)
    assert {one["item_id"] for one in events[3:6]} == {first["id"]}


def test_a_call_that_is_cut_off_is_incomplete(tokenizer: Tokenizer) -> None:
    cut = says(CALL[: CALL.index('me"}')], reason=FinishReason.LENGTH)
    server = ResponsesServer(tokenizer, cut, says("ok"))
    answer = server.create("Rain?", tools=[WEATHER])
    [called] = answer.output
    assert (answer.status, called.status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert called.arguments == '{"city": "Ro'  # type: ignore[union-attr]

    server.create("Go on.", previous_response_id=answer.id)
    assert server.prompts[1] == "user: Rain?\nuser: Go on.\nassistant: "  # it was never made


@pytest.mark.parametrize("kept", [True, False])
def test_results_and_earlier_calls_are_in_the_prompt(tokenizer: Tokenizer, kept: bool) -> None:
    """By the id of the answer, or by sending its items back: the prompts are the same."""

    both = CALL + call("weather", OSLO)
    server = ResponsesServer(tokenizer, says(f"<think>Hm.</think>Well.\n{CALL}"), says(both), says("Dry."))
    asked: list[Any] = [{"role": "user", "content": "Rain?"}]
    more: dict[str, Any] = {"tools": [WEATHER], "store": kept}
    for result in ("no", "yes"):
        answer = server.create(asked, **more)
        *_, called = answer.output
        asked = [] if kept else asked + [item.model_dump() for item in answer.output]
        asked.append({"type": "function_call_output", "call_id": called.call_id, "output": result})  # type: ignore[union-attr]
        if kept:
            more["previous_response_id"] = answer.id
    parts = [{"type": "input_text", "text": "So"}, {"type": "input_text", "text": "?"}]
    server.create([*asked, {"role": "user", "content": parts}], **more)
    rome, oslo = (call("weather", place).replace("\n", "") for place in (ROME, OSLO))
    assert server.prompts[-1].split("\n", 1)[1] == (
        f"user: Rain?\nassistant: <think>Hm.</think>Well.{rome}\n"
        f"tool!: no\nassistant: {rome}{oslo}\ntool!: yes\nuser: So?\nassistant: "
    )


def test_tool_choice_selects_a_function_or_none(tokenizer: Tokenizer) -> None:
    both: dict[str, Any] = {"asked": "Rain?", "tools": [WEATHER, TIME]}
    server = ResponsesServer(tokenizer, says(call("time", "{}")), says("{}"))
    choice: Any = {"type": "function", "name": "time"}
    assert server.create(tool_choice=choice, **both).to_dict()["tool_choice"] == choice
    assert '"time' in server.form().replace("\\", "")
    assert "weather" not in server.form()
    none = server.create(tool_choice="none", text={"format": {"type": "json_object"}}, **both)
    assert [item.type for item in none.output] == ["message"]
    assert "tools:" not in server.prompts[1]
    assert server.backend.works[1].params.response_format == {"type": "json_object"}


def test_beside_a_form_an_answer_is_calls_or_the_form(tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "required": ["rain"]}}
    both: dict[str, Any] = {"asked": "Rain?", "tools": [WEATHER], "text": {"format": form}}

    made = call("weather", '{"city": "Oslo"}')
    server = ResponsesServer(tokenizer, says(made), says('{"rain": 1}'), says(made))
    called = server.create(**both)
    assert [item.type for item in called.output] == ["function_call"]
    reply = server.create(**both)
    assert reply.output_text == '{"rain": 1}'
    assert reply.to_dict()["text"]["format"] == form  # type: ignore[index]
    server.create(**both, tool_choice="required")
    free, again, must = map(server.form, range(3))
    assert "answer: calls | form" in free
    assert '"required": ["rain"]' in free
    assert again == free
    assert must
    assert "rain" not in must


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}}, "tool_choice"),
    ({"tools": [WEATHER], "text": {"format": {"type": "json_schema", "name": ""}}}, "text.format"),
    ({"tools": [WEATHER], "regex": "(a"}, "regex"),
    ({"tools": [WEATHER], "regex": "hm</think>Yes"}, "regex"),  # the server adds the reasoning
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input"),
]


def test_unsupported_values_are_refused_by_name(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer)
    for body, param in REFUSED:
        status, named, message = server.refusal(**{"input": "Hi"} | body)
        assert (status, named) == (400, param), message
        assert ".function" not in message or param == "input"
    assert server.backend.works == []


def test_reasoning_is_an_item_before_the_message(tokenizer: Tokenizer) -> None:
    thinks = ("<think>\nTwo ", "and two.", "\n</think>\n\nFo", "ur.")
    server = ResponsesServer(tokenizer, says(*thinks))
    events, types = server.stream(input="2+2?")
    both = [*item("reasoning_text", 2), *item("output_text", 2)]
    assert types == ["created", "in_progress", *both, "completed"]
    assert [one["delta"] for one in events if "delta" in one] == ["Two ", "and two.", "Fo", "ur."]
    assert [one["output_index"] for one in events[2:-1]] == [0] * 5 + [1] * 7
    reasoning_item, message = events[-1]["response"]["output"]
    assert (reasoning_item["summary"], reasoning_item["status"]) == ([], "completed")
    details = events[-1]["response"]["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": len("".join(thinks).removesuffix("\n\nFour."))}
    assert (events[6]["item"], events[-2]["item"]) == (reasoning_item, message)
    assert events[2]["item"] == reasoning_item | {"content": [], "status": "in_progress"}
    assert events[5]["text"] == reasoning_item["content"][0]["text"] == "Two and two."
    assert {one["item_id"] for one in events[3:6]} == {reasoning_item["id"]}


def test_an_answer_may_end_within_its_reasoning(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("<think>Tw", reason=FinishReason.LENGTH))
    answer = server.create("2+2?", max_output_tokens=9)
    [reasoning_item] = answer.output
    assert (answer.status, reasoning_item.status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert reasoning_item.type == "reasoning"
    assert answer.output_text == ""


def test_the_template_may_open_the_reasoning_and_gets_the_effort(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("Hm.</think>Four."))
    thinks = {"chat_template_kwargs": {"thinks": True}}
    answer = server.create("2+2?", reasoning={"effort": "low"}, extra_body=thinks)
    assert server.prompts == ["user: 2+2?\nassistant: (low)<think>\n"]
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert (answer.output_text, answer.reasoning.effort) == ("Four.", "low")  # type: ignore[union-attr]
    unknown = {"chat_template_kwargs": {"odd": 1}}
    assert server.refusal(input="x", **unknown)[:2] == (400, "chat_template_kwargs")
