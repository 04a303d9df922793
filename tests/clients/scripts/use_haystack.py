"""Haystack: a generator, tools and structured output."""

from __future__ import annotations

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.generators.utils import print_streaming_chunk
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from zoo import LISBON, MODEL, RIVERS, URL, check, says
from zoo_forms import Weather, weather

AT = {"model": MODEL, "api_base_url": URL, "api_key": Secret.from_token("unused")}
SHORT = {"max_tokens": 32, "temperature": 0}
LONG = {"max_tokens": 200, "temperature": 0}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
QUESTION = [ChatMessage.from_user(RIVERS)]


tool = create_tool_from_function(weather)


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    [whole] = OpenAIChatGenerator(**AT, generation_kwargs=SHORT).run(QUESTION)["replies"]
    assert whole.text == says(RIVERS, max_tokens=32, temperature=0)
    pieces = []
    streaming = OpenAIChatGenerator(**AT, generation_kwargs=SHORT, streaming_callback=pieces.append)
    [streamed] = streaming.run(QUESTION)["replies"]
    assert "".join(piece.content for piece in pieces) == streamed.text == whole.text
    assert whole.meta["usage"]["completion_tokens"] == 32


@check
def a_tool_is_called_whole_and_streamed() -> None:
    generator = OpenAIChatGenerator(**AT, tools=[tool], generation_kwargs={**LONG, **NAMED})
    question = [ChatMessage.from_user(LISBON)]
    [call] = generator.run(question)["replies"][0].tool_calls
    assert tool.invoke(**call.arguments).startswith("21 degrees")
    [streamed] = generator.run(question, streaming_callback=print_streaming_chunk)["replies"][0].tool_calls
    assert streamed.arguments == call.arguments


@check
def a_form_is_a_pydantic_class() -> None:
    generator = OpenAIChatGenerator(**AT, generation_kwargs={**LONG, "response_format": Weather})
    [reply] = generator.run([ChatMessage.from_user(LISBON)])["replies"]
    assert Weather.model_validate_json(reply.text)
