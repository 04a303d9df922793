"""LlamaIndex: a model at an OpenAI-compatible URL, tools, structured output, and an agent."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from zoo import LISBON, MODEL, RIVERS, URL, check, says
from zoo_forms import Weather, weather

AT = {"model": MODEL, "api_base": URL, "api_key": "unused", "temperature": 0, "context_window": 8192}
AT |= {"is_chat_model": True, "is_function_calling_model": True}
chat = OpenAILike(**AT, max_tokens=32)
longer = OpenAILike(**AT, should_use_structured_outputs=True, max_tokens=200)
QUESTION = [ChatMessage(role="user", content=RIVERS)]


TOOL = FunctionTool.from_defaults(weather)


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    whole = chat.chat(QUESTION).message.content
    assert whole == says(RIVERS, max_tokens=32, temperature=0)
    assert "".join(piece.delta for piece in chat.stream_chat(QUESTION)) == whole


@check
def a_tool_is_called_whole_and_streamed() -> None:
    asked = {"tools": [TOOL], "user_msg": LISBON, "tool_required": True, "allow_parallel_tool_calls": False}
    [call] = longer.get_tool_calls_from_response(longer.chat_with_tools(**asked))
    assert TOOL.call(**call.tool_kwargs).raw_output.startswith("21 degrees")
    *_, last = longer.stream_chat_with_tools(**asked)
    [streamed] = longer.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs


@check
def a_form_is_a_pydantic_class() -> None:
    answer = longer.structured_predict(Weather, PromptTemplate("{question}"), question=LISBON)
    assert isinstance(answer, Weather)


@check
async def an_agent_answers() -> None:
    told = {"system_prompt": "Use the tool.", "initial_tool_choice": "weather"}
    agent = FunctionAgent(tools=[TOOL], llm=longer, **told)
    result = await agent.run(LISBON)
    assert any(call.tool_output.raw_output.startswith("21 degrees") for call in result.tool_calls)
    assert str(result)
