"""OpenAI's Agents SDK: agents with tools, structured output and handoffs, at both endpoints."""

from __future__ import annotations

from dataclasses import replace

import agents
import openai
from agents import Agent, ModelSettings, RunHooks, Runner, function_tool
from zoo import GREETING, LISBON, MODEL, URL, check, says
from zoo_forms import Weather
from zoo_forms import weather as plain_weather

client = openai.AsyncOpenAI(base_url=URL, api_key="unused")
weather = function_tool(plain_weather)
MODELS = (agents.OpenAIChatCompletionsModel(MODEL, client), agents.OpenAIResponsesModel(MODEL, client))
SHORT = ModelSettings(temperature=0, max_tokens=200, include_usage=True)
FORCED = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)


@check
async def a_stream_has_the_text_of_the_whole_answer() -> None:
    for model in MODELS:
        agent = Agent(name="guide", model=model, model_settings=SHORT)
        whole = await Runner.run(agent, GREETING)
        assert whole.final_output == says(GREETING, max_tokens=200, temperature=0)
        text = ""
        streamed = Runner.run_streamed(agent, GREETING)
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert text == whole.final_output == streamed.final_output
        assert streamed.context_wrapper.usage.output_tokens == whole.context_wrapper.usage.output_tokens


@check
async def a_tool_is_called_and_its_result_is_answered() -> None:
    for model in MODELS:
        agent = Agent(name="guide", model=model, model_settings=FORCED, tools=[weather])
        done = await Runner.run(agent, LISBON, max_turns=4)
        [result] = [item for item in done.new_items if item.type == "tool_call_output_item"]
        assert result.output.startswith("21 degrees")
        assert done.final_output


@check
async def a_tool_is_called_in_a_stream() -> None:
    for model in MODELS:
        agent = Agent(name="guide", model=model, model_settings=FORCED, tools=[weather])
        done = Runner.run_streamed(agent, LISBON, max_turns=4)
        items = [event.item async for event in done.stream_events() if event.type == "run_item_stream_event"]
        assert [item.type for item in items][:2] == ["tool_call_item", "tool_call_output_item"]


@check
async def a_form_is_a_pydantic_class() -> None:
    settings = ModelSettings(temperature=0, max_tokens=200)
    for model in MODELS:
        agent = Agent(name="guide", model=model, model_settings=settings, output_type=Weather)
        assert isinstance((await Runner.run(agent, LISBON)).final_output, Weather)


class Once(RunHooks):
    """Forces the tool first, then an answer: a small model might call the tool forever."""

    async def on_tool_end(self, context: object, agent: Agent, tool: object, result: object) -> None:
        agent.model_settings = replace(agent.model_settings, tool_choice="none")


@check
async def tools_and_a_form_go_together() -> None:
    for model in MODELS:
        given = {"tools": [weather], "output_type": Weather, "reset_tool_choice": False}
        agent = Agent(name="guide", model=model, model_settings=FORCED, **given)
        done = await Runner.run(agent, LISBON, max_turns=3, hooks=Once())
        assert isinstance(done.final_output, Weather)


@check
async def an_agent_hands_over_to_another() -> None:
    for model in MODELS:
        clerk = Agent(name="clerk", model=model, model_settings=SHORT, output_type=Weather)
        desk = Agent(name="desk", model=model, model_settings=FORCED, handoffs=[clerk])
        done = await Runner.run(desk, LISBON, max_turns=4)
        assert done.last_agent.name == "clerk"
        assert isinstance(done.final_output, Weather)
