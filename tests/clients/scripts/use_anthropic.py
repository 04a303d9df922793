"""Anthropic's Python client, at /v1/messages: answers, streams, tools, errors."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import anthropic
from zoo import LISBON, MODEL, RIVERS, ROOT, WEATHER, ask, check, holds_to_weather, refused, says

client = anthropic.Anthropic(base_url=ROOT, api_key="unused")
ASKED = {"model": MODEL, "max_tokens": 32, "messages": [{"role": "user", "content": RIVERS}]}
ASKED["extra_body"] = {"temperature": 0}  # no longer a parameter of the client
TOOL = {"name": "weather", "description": "Returns the weather of a city.", "input_schema": WEATHER}
TOOLS = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 200}
CACHED = {"cache_control": {"type": "ephemeral"}}


@check
def an_answer_is_that_of_chat_completions() -> None:
    answer = client.messages.create(**ASKED)
    [block] = answer.content
    assert block.text == says(RIVERS, max_tokens=32, temperature=0)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 32)


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == last.content[0].text == whole.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.stop_reason == whole.stop_reason


@check
def a_system_prompt_in_parts_is_read() -> None:
    parts = [{"type": "text", "text": "You answer in one word.", **CACHED}]
    question = [{"role": "user", "content": [{"type": "text", "text": RIVERS, **CACHED}]}]
    answer = client.messages.create(**{**ASKED, "messages": question}, system=parts)
    messages = [{"role": "system", "content": parts[0]["text"]}, {"role": "user", "content": RIVERS}]
    plain = ask("/v1/chat/completions", messages=messages, max_tokens=32, temperature=0)
    assert answer.content[0].text == plain["choices"][0]["message"]["content"]


@check
def a_stop_text_ends_the_answer() -> None:
    answer = client.messages.create(**{**ASKED, "max_tokens": 200}, stop_sequences=["."])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ".")
    assert "." not in answer.content[0].text


@check
def a_tool_is_used_and_its_result_is_answered() -> None:
    question = {"role": "user", "content": LISBON}
    first = client.messages.create(**{**ASKED, **TOOLS, "messages": [question]})
    assert first.stop_reason == "tool_use"
    use = first.content[-1]
    assert use.name == "weather"
    assert holds_to_weather(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees, sunny"}
    turns = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**ASKED, "messages": turns}, tools=[TOOL])
    assert second.content[0].text


@check
def a_streamed_use_is_the_whole_use() -> None:
    asked = {**ASKED, **TOOLS, "messages": [{"role": "user", "content": LISBON}]}
    with client.messages.stream(**asked) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        use = stream.get_final_message().content[-1]
    assert holds_to_weather(pieces)
    assert use.input == client.messages.create(**asked).content[-1].input


@check
def tokens_are_counted() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    usage = client.messages.create(**ASKED).usage
    created = usage.cache_creation_input_tokens
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens + created


@check
def the_block_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(import anthropic\n.*?)^```$", page, re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(block.replace("http://127.0.0.1:8000", ROOT), {})
    assert re.search(r"\n\d+ tokens\n$", out.getvalue())


@check
def errors_are_the_clients_own() -> None:
    with refused(anthropic.BadRequestError, "temperature"):
        client.messages.create(**{**ASKED, "extra_body": {"temperature": -1}})
    assert client.messages.create(**{**ASKED, "model": "claude"}).model == MODEL
