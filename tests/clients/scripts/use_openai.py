"""OpenAI's Python client: answers, streams, tools, structured output, logprobs, responses, errors."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
from pydantic import BaseModel
from zoo import LISBON, MODEL, RIVERS, TOOL, URL, WEATHER, City, check, holds_to_weather, refused, says

client = openai.OpenAI(base_url=URL, api_key="unused")
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": RIVERS}]}
ASKED |= {"max_tokens": 32, "temperature": 0.8, "seed": 7}
NAMED = {"type": "function", "function": {"name": "weather"}}


class Weather(BaseModel):
    """A form."""

    city: City
    sky: Literal["sunny", "cloudy", "rainy"]
    warm: bool


@check
def the_model_is_listed() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    whole = client.chat.completions.create(**ASKED)
    assert whole.choices[0].message.content == says(RIVERS, max_tokens=32, temperature=0.8, seed=7)
    text, usage = "", None
    for chunk in client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@check
async def many_at_once_are_answered_as_one_by_one() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="unused") as many:
        asked = [{**ASKED, "seed": seed} for seed in range(6)]
        answers = await asyncio.gather(*(many.chat.completions.create(**one) for one in asked))
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [client.chat.completions.create(**one).choices[0].message.content for one in asked]


@check
def several_choices_and_a_stop_text() -> None:
    answer = client.chat.completions.create(**ASKED, n=3, stop=["."])
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all("." not in choice.message.content for choice in answer.choices)


@check
def log_probabilities_are_those_of_the_likeliest_tokens() -> None:
    asked = {**ASKED, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**asked).choices[0]
    for token in answer.logprobs.content:
        assert token.logprob == max(other.logprob for other in token.top_logprobs) <= 0
    written = b"".join(bytes(token.bytes) for token in answer.logprobs.content)
    assert written.decode().startswith(answer.message.content)


@check
def a_tool_is_called_and_its_result_is_answered() -> None:
    messages = [{"role": "user", "content": LISBON}]
    asked = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_tokens": 100}
    first = client.chat.completions.create(messages=messages, tool_choice=NAMED, **asked).choices[0]
    [call] = first.message.tool_calls
    assert call.function.name == "weather"
    assert holds_to_weather(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
    second = client.chat.completions.create(messages=[*messages, first.message, result], **asked)
    assert second.choices[0].message.content


@check
def a_streamed_call_is_the_whole_call() -> None:
    asked = {"messages": [{"role": "user", "content": LISBON}], "tools": [TOOL], "tool_choice": "required"}
    asked |= {"model": MODEL, "temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
    [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert holds_to_weather(call.function.arguments)


@check
def a_form_is_a_pydantic_class() -> None:
    asked = {"messages": [{"role": "user", "content": LISBON}], "max_tokens": 200, "temperature": 0}
    answer = client.chat.completions.parse(model=MODEL, response_format=Weather, **asked)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check
def responses_go_on_from_an_earlier_one() -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 32}
    first = client.responses.create(input=RIVERS, **asked)
    assert first.output_text == says(RIVERS, temperature=0, max_tokens=32)
    second = client.responses.create(input="And one more.", previous_response_id=first.id, **asked)
    with client.responses.stream(input="And one more.", previous_response_id=first.id, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == second.output_text
    assert second.usage.input_tokens > first.usage.total_tokens


@check
def responses_call_tools_and_keep_forms() -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked = {"model": MODEL, "input": LISBON, "temperature": 0, "max_output_tokens": 200}
    choice = {"type": "function", "name": "weather"}
    answer = client.responses.create(**asked, tools=[tool], tool_choice=choice)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert holds_to_weather(call.arguments)
    assert isinstance(client.responses.parse(**asked, text_format=Weather).output_parsed, Weather)


@check
def a_prompt_is_continued() -> None:
    asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    assert "Paris" in whole.choices[0].text
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text


@check
def errors_are_the_clients_own() -> None:
    with refused(openai.BadRequestError, "temperature", "-1"):
        client.chat.completions.create(**{**ASKED, "temperature": -1})
    assert client.chat.completions.create(**{**ASKED, "model": "gpt-4o"}).model == MODEL
    with refused(openai.BadRequestError, "response_format"):
        client.chat.completions.create(**ASKED, response_format={"type": "xml"})
    with refused(openai.NotFoundError, "embeddings"):
        client.embeddings.create(model=MODEL, input="rivers")
