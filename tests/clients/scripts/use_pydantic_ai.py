"""Pydantic AI: agents whose answers are classes, at both of OpenAI's endpoints."""

from __future__ import annotations

from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from zoo import LISBON, MODEL, RIVERS, URL, check, says
from zoo_forms import Weather, weather

AT = OpenAIProvider(base_url=URL, api_key="unused")
chat = OpenAIChatModel(MODEL, provider=AT)
responses = OpenAIResponsesModel(MODEL, provider=AT)
SHORT = {"temperature": 0, "max_tokens": 32}
LONG = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}


def forced_at_first(run: RunContext) -> dict:
    return {**LONG, "tool_choice": ["weather"] if run.run_step == 1 else "auto"}


@check
def an_answer_is_the_models() -> None:
    for model in (chat, responses):
        answer = Agent(model, model_settings=SHORT).run_sync(RIVERS)
        assert answer.output == says(RIVERS, max_tokens=32, temperature=0)
        assert answer.usage.output_tokens == 32


@check
async def a_stream_has_the_text_of_the_whole_answer() -> None:
    for model in (chat, responses):
        async with Agent(model, model_settings=SHORT).run_stream(RIVERS) as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        assert text == says(RIVERS, max_tokens=32, temperature=0)


@check
def a_form_is_kept_by_each_mode() -> None:
    for model in (chat, responses):
        for mode in (ToolOutput, NativeOutput):
            answer = Agent(model, output_type=mode(Weather), model_settings=LONG).run_sync(LISBON)
            assert isinstance(answer.output, Weather)


@check
async def a_form_grows_in_a_stream() -> None:
    agent = Agent(chat, output_type=NativeOutput(Weather), model_settings=LONG)
    async with agent.run_stream(LISBON) as stream:
        grown = [part async for part in stream.stream_output(debounce_by=None)]
    assert isinstance(grown[-1], Weather)


@check
def a_tool_is_called_and_its_result_is_answered() -> None:
    for model in (chat, responses):
        agent = Agent(model, tools=[weather], model_settings=forced_at_first)
        answer = agent.run_sync(LISBON, usage_limits=UsageLimits(request_limit=4))
        parts = [part for message in answer.all_messages() for part in message.parts]
        [result] = [part for part in parts if part.part_kind == "tool-return"]
        assert result.content.startswith("21 degrees")
        assert answer.output
