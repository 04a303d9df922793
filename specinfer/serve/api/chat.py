"""POST /v1/chat/completions: answers to conversations."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag

from specinfer.request import Delta, FinishReason
from specinfer.serve.api.answer import Event, Prompts
from specinfer.serve.api.completions import ChoicesAnswer
from specinfer.serve.api.reports import ChatLogprobs
from specinfer.serve.dialect.call_parser import ArgumentsPiece, CallStarted, Content, ReasoningPiece
from specinfer.serve.dialect.call_parser import Event as Found
from specinfer.serve.fields.body import Fields, Items, TextOrItems, by_type
from specinfer.serve.fields.conversation import Choice, ConversationFields, Function, FunctionOrOther
from specinfer.serve.fields.sampling import MAX_LOGPROBS, Prediction, TextPart
from specinfer.serve.http.api_error import ApiError


class RefusalPart(Fields):
    """A refusal of the assistant in an earlier turn."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


PART_KIND: Final = by_type({"refusal": "Refusal"}, "Text")
_Part = Annotated[Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")], PART_KIND]


class FunctionCall(Fields):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrItems[_Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    images: None = None
    function_call: None = None

    def rendered(self) -> dict[str, Any]:
        """Convert to the input of `messages_for_template`."""
        return self.model_dump(by_alias=True, exclude_none=True)


class ChatTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.function.name


class ChatFields(ConversationFields):
    """The request body: a conversation to answer."""

    messages: Items[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prediction: Prediction | None = None
    tools: Items[FunctionOrOther[ChatTool]] | None = None
    tool_choice: Choice[NamedTool] | None = None
    reasoning_effort: str | None = Field(None, description="Passed to the model's chat template.")

    def check(self) -> None:
        """Raise ApiError for missing or contradicting fields."""
        super().check()
        if not self.messages:
            raise ApiError("messages is empty; give at least one message", param="messages")
        for i, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":  # may have tool calls instead
                raise ApiError(
                    f"a message of role {message.role!r} needs content; give a text",
                    param=f"messages[{i}].content",
                )
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true; add it", param="top_logprobs")
        self.check_equal("max_tokens", "max_completion_tokens")


class Chat(ChoicesAnswer[ChatFields]):
    """The n answers to one conversation while they are generated."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _keep(self, events: list[Event]) -> None:
        for piece in events:
            if calls := piece["delta"].get("tool_calls"):
                piece["delta"]["tool_calls"] = {call.pop("index"): call for call in calls}
        super()._keep(events)

    def _finish(self) -> dict[str, Any]:
        for choice in self._choices.values():
            delta = choice.pop("delta")
            first = {"role": "assistant", "content": delta.pop("content") or None, "refusal": None}
            choice["message"] = first | delta
            if "tool_calls" in delta:
                choice["message"]["tool_calls"] = [*delta["tool_calls"].values()]
        return super()._finish()

    async def _prepare(self) -> Prompts:
        fields = self._fields
        messages = [message.rendered() for message in fields.messages]
        token_ids, params, self._readers = await self._converse(fields, messages)
        shape = partial(ChatLogprobs, fields.top_logprobs or 0, self._service.tokenizer)
        self._logprobs = [shape(params.visible_token_ids) for _ in self._readers if fields.logprobs]
        return [token_ids], [params]

    async def _take(self, number: int, delta: Delta) -> list[Event]:
        fields, reader, reason = self._fields, self._readers[number], delta.finish_reason
        message = _delta(reader.read(delta))
        self._tally.reasoning_tokens = sum(one.reasoning_tokens for one in self._readers)
        called = reason is FinishReason.STOP and reader.called
        piece: Event = {
            "delta": message,
            "finish_reason": "tool_calls" if called else None if reason is None else reason.value,
            "logprobs": None,
        }
        if fields.logprobs:
            piece["logprobs"] = {"content": self._logprobs[number].add(delta), "refusal": None}
        if fields.trace:
            piece["trees"] = list(delta.trees)
        if delta.prompt_logprobs is not None:
            piece |= await asyncio.to_thread(self._reported_prompt, delta)
        if not (any(piece.values()) or fields.trace or "prompt_logprobs" in piece):
            return []
        pieces = self._split_end(piece, delta) if fields.logprobs else [piece]
        if number not in self._started:
            self._started.add(number)
            pieces[0]["delta"] = {"role": "assistant", "content": ""} | message
        return [{"index": number} | one for one in pieces]

    def _split_end(self, piece: dict[str, Any], delta: Delta) -> list[dict[str, Any]]:
        """Split off a last token without text from a piece with log-probabilities; returns 1 or 2 pieces.

        Some clients join the tokens of a piece to get its text, which would contain the end token's name.
        """
        logprobs = piece["logprobs"]["content"]
        if (
            len(logprobs) < 2
            or not delta.finish_reason
            or not self._service.tokenizer.is_special(delta.token_ids[-1])
        ):
            return [piece]
        before, last = logprobs[:-1], logprobs[-1]
        end = {"delta": {}, "finish_reason": piece["finish_reason"]}
        return [
            piece | {"finish_reason": None, "logprobs": {"content": before, "refusal": None}},
            end | {"logprobs": {"content": [last], "refusal": None}},
        ]


def _delta(found: list[Found]) -> dict[str, Any]:
    """Convert parsed events to a delta of OpenAI's streams, with one entry for each tool call."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for one in found:
        match one:
            case ReasoningPiece(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case CallStarted(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ArgumentsPiece(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
