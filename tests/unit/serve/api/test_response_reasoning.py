"""Reasoning as items of a response."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from specinfer.request import FinishReason
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL, byte_tokenizer, says
from tests.unit.serve.api.responses_server import ResponsesServer

# Earlier reasoning precedes its answer; `enable_thinking` opens new reasoning.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}"
    "assistant: {% if thinks %}({{ reasoning_effort }})<think>{{ '\n' }}{% endif %}"
)
ANSWER = ("<think>\nTwo ", "and two.", "\n</think>\n\nFo", "ur.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("thinking"), TEMPLATE)


def test_reasoning_is_an_item_before_the_message(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says(*ANSWER))
    answer = server.responses.create(model=MODEL, input="2+2?")
    Response.model_validate(answer.model_dump())
    reasoning_item, message = answer.output
    assert reasoning_item.type == "reasoning"
    assert (reasoning_item.summary, reasoning_item.status) == ([], "completed")
    assert [part.model_dump() for part in reasoning_item.content or ()] == [
        {"type": "reasoning_text", "text": "Two and two."}
    ]
    assert message.type == "message"
    assert answer.output_text == "Four."
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len(ANSWER[0] + ANSWER[1])
    assert answer.usage.output_tokens == len("".join(ANSWER))


def test_reasoning_is_streamed_before_the_message(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says(*ANSWER))
    events, types = server.stream(input="2+2?")
    assert types == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [one["delta"] for one in events if "delta" in one] == ["Two ", "and two.", "Fo", "ur."]
    assert [one["output_index"] for one in events[2:-1]] == [0] * 5 + [1] * 7
    reasoning_item, message = events[-1]["response"]["output"]
    assert (events[6]["item"], events[-2]["item"]) == (reasoning_item, message)
    assert events[2]["item"] == reasoning_item | {"content": [], "status": "in_progress"}
    assert events[5]["text"] == reasoning_item["content"][0]["text"] == "Two and two."
    assert {one["item_id"] for one in events[3:6]} == {reasoning_item["id"]}


def test_an_answer_may_end_within_its_reasoning(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("<think>Tw", reason=FinishReason.LENGTH))
    answer = server.responses.create(model=MODEL, input="2+2?", max_output_tokens=9)
    [reasoning_item] = answer.output
    assert (answer.status, reasoning_item.type, reasoning_item.status) == (
        "incomplete",
        "reasoning",
        "incomplete",
    )  # type: ignore[union-attr]
    assert answer.output_text == ""


@pytest.mark.parametrize("kept", [True, False])
def test_earlier_reasoning_is_passed_to_the_template(tokenizer: Tokenizer, kept: bool) -> None:
    server = ResponsesServer(tokenizer, says(*ANSWER), says("Five."))
    first = server.responses.create(model=MODEL, input="2+2?", store=kept)
    more: Any = {"role": "user", "content": "And 3?"}
    if kept:
        server.responses.create(model=MODEL, input=[more], previous_response_id=first.id)
    else:
        back: Any = [item.model_dump() for item in first.output]
        asked: Any = [{"role": "user", "content": "2+2?"}, *back, more]
        server.responses.create(model=MODEL, input=asked)
    assert server.prompts[1] == (
        "user: 2+2?\nassistant: <think>Two and two.</think>Four.\nuser: And 3?\nassistant: "
    )


def test_the_template_may_open_the_reasoning_and_gets_the_effort(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("Hm.</think>Four."))
    answer = server.responses.create(
        model=MODEL,
        input="2+2?",
        reasoning={"effort": "low"},
        extra_body={"chat_template_kwargs": {"thinks": True}},
    )
    assert server.prompts == ["user: 2+2?\nassistant: (low)<think>\n"]
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "Four."
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"
    unknown = {"chat_template_kwargs": {"odd": 1}}
    assert server.refusal(input="x", **unknown)[:2] == (400, "chat_template_kwargs")
