"""LiteLLM, as the client of an OpenAI-compatible server."""

from __future__ import annotations

import litellm
from zoo import LISBON, MODEL, RIVERS, TOOL, URL, check, holds_to_weather, refused, says
from zoo_forms import Weather

AT = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "unused"}
ASKED = {**AT, "messages": [{"role": "user", "content": RIVERS}], "max_tokens": 32, "temperature": 0}
TOLD = [{"role": "user", "content": LISBON}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    whole = litellm.completion(**ASKED)
    assert whole.choices[0].message.content == says(RIVERS, max_tokens=32, temperature=0)
    chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens == 32


@check
def the_provider_for_vllm_servers_works_too() -> None:
    answer = litellm.completion(**{**ASKED, "model": f"hosted_vllm/{MODEL}"}, top_k=1)
    assert answer.choices[0].message.content == says(RIVERS, max_tokens=32, temperature=0)


@check
def marks_for_a_cache_are_taken() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [{"type": "text", "text": RIVERS, **mark}]}]
    for asked in ({"messages": marked}, {"messages": [{"role": "user", "content": RIVERS, **mark}]}):
        answer = litellm.completion(**{**ASKED, **asked})
        assert answer.choices[0].message.content == says(RIVERS, max_tokens=32, temperature=0)


@check
def a_tool_is_called_whole_and_streamed() -> None:
    asked = {**ASKED, "messages": TOLD, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 200}
    message = litellm.completion(**asked).choices[0].message
    [call] = message.tool_calls
    assert holds_to_weather(call.function.arguments)
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
    answer = litellm.completion(**{**ASKED, "messages": [*TOLD, message, result]}, tools=[TOOL])
    assert answer.choices[0].message.content


@check
def a_form_is_a_pydantic_class() -> None:
    answer = litellm.completion(**{**ASKED, "messages": TOLD, "max_tokens": 200}, response_format=Weather)
    assert Weather.model_validate_json(answer.choices[0].message.content)


@check
def a_prompt_is_continued() -> None:
    asked = {**AT, "model": f"text-completion-openai/{MODEL}", "max_tokens": 8, "temperature": 0}
    answer = litellm.text_completion(**asked, prompt="The capital of France is")
    assert "Paris" in answer.choices[0].text


@check
def messages_in_anthropics_shape_are_translated() -> None:
    answer = litellm.anthropic.messages.create(**ASKED)
    assert answer["content"][0]["text"] == says(RIVERS, max_tokens=32, temperature=0)


@check
def errors_are_the_clients_own() -> None:
    with refused(litellm.BadRequestError, "temperature"):
        litellm.completion(**{**ASKED, "temperature": -1})
    assert litellm.completion(**{**ASKED, "model": "openai/gpt-4o"}).choices[0].message.content
