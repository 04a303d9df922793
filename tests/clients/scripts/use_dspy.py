"""DSPy: signatures that a small model fills in, because the server enforces their format."""

from __future__ import annotations

import asyncio
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from zoo import LISBON, MODEL, RIVERS, URL, City, check, says

AT = {"api_base": URL, "api_key": "unused", "cache": False, "temperature": 0, "num_retries": 0}
# DSPy sends schemas and tools only to providers that declare support for them.
SERVER = ProviderDefinition.chat(AccessPolicy(provider="specinfer", base_url=URL), compat=OpenAIChatCompat())
register_provider(SERVER, supports=ModelSupport(function_calling=True, response_schema=True))
lm = dspy.LM(f"specinfer/{MODEL}", max_tokens=300, **AT)
short = dspy.LM(f"openai/{MODEL}", max_tokens=32, **AT)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Review(dspy.Signature):
    """Is the review kind?"""

    review: str = dspy.InputField()
    mood: Literal["kind", "unkind"] = dspy.OutputField()
    city: City = dspy.OutputField()
    sure: bool = dspy.OutputField()


def weather(city: City) -> str:
    """Returns the weather of a city."""
    return f"21 degrees in {city}"


@check
def an_answer_is_the_models() -> None:
    assert short(RIVERS) == [says(RIVERS, max_tokens=32, temperature=0)]


@check
def a_signature_is_filled_in() -> None:
    filled = dspy.Predict(Review)(review="I loved Lisbon.")
    assert filled.mood in ("kind", "unkind")
    assert filled.city in ("Lisbon", "Porto")
    assert isinstance(filled.sure, bool)


@check
async def a_program_is_streamed() -> None:
    predict = dspy.Predict(Review)
    listener = dspy.streaming.StreamListener(signature_field_name="mood")
    program = dspy.streamify(predict, stream_listeners=[listener])
    parts = [part async for part in program(review="I loved Lisbon.")]
    assert parts[-1].mood == (await asyncio.to_thread(predict, review="I loved Lisbon.")).mood


@check
def a_tool_is_called_by_a_native_call() -> None:
    made = dspy.LM(f"specinfer/{MODEL}", max_tokens=100, tool_choice="required", **AT)
    tool = dspy.Tool(weather)
    with dspy.context(lm=made, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        signature = dspy.Signature("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
        filled = dspy.Predict(signature)(question=LISBON, tools=[tool])
    assert tool(**filled.calls.tool_calls[0].args).startswith("21 degrees")
