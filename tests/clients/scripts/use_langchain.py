"""LangChain: a chat model, tools, structured output, and an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from zoo import JSON, LISBON, MODEL, RIVERS, URL, City, Unit, check, says
from zoo_forms import Weather
from zoo_forms import weather as plain_weather

AT = {"model": MODEL, "base_url": URL, "api_key": "unused", "temperature": 0}
chat = ChatOpenAI(**AT, max_tokens=32, stream_usage=True)
longer = ChatOpenAI(**AT, max_tokens=200)


weather = tool(plain_weather)
ANSWERS = [weather.invoke({"city": city, "unit": unit}) for city in get_args(City) for unit in get_args(Unit)]


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    whole = chat.invoke(RIVERS)
    assert whole.content == says(RIVERS, max_tokens=32, temperature=0)
    chunks = list(chat.stream(RIVERS))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 32


@check
def a_tool_is_called_whole_and_streamed() -> None:
    bound = longer.bind_tools([weather], tool_choice="weather")
    [call] = bound.invoke(LISBON).tool_calls
    assert weather.invoke(call).content in ANSWERS
    total = None
    for chunk in bound.stream(LISBON):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == call["args"]


@check
def forms_are_kept_by_each_method() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(longer.with_structured_output(Weather, method=method).invoke(LISBON), Weather)
    assert isinstance(longer.with_structured_output(Weather, method="json_mode").invoke(JSON), Weather)


@wrap_model_call
def once(request: ModelRequest, handler: Callable[[ModelRequest], object]) -> object:
    """Force the tool first, then an answer: a small model might call the tool forever."""
    if any(message.type == "tool" for message in request.messages):
        return handler(request.override(tools=[], model_settings={"parallel_tool_calls": False}))
    return handler(request.override(tool_choice="weather"))


@check
def an_agent_with_tools_answers_in_a_form() -> None:
    for strategy in (ProviderStrategy(Weather), ToolStrategy(Weather)):
        agent = create_agent(longer, [weather], response_format=strategy, middleware=[once])
        result = agent.invoke({"messages": [("user", LISBON)]}, {"recursion_limit": 9})
        assert isinstance(result["structured_response"], Weather)
        assert any(message.type == "tool" for message in result["messages"])
