"""POST /v1/chat/completions: answers to conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag

from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.chat_prompt import ChatPrompt
from specinfer.serve.api.completions import ChoicesAnswer
from specinfer.serve.api.reports import ChatLogprobs, reported_prompt
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.dialect import AnswerReader
from specinfer.serve.dialect.reader import ArgumentsPiece, CallStarted, Content, Event, ReasoningPiece
from specinfer.serve.dialect.tool import ToolChoice
from specinfer.serve.fields.body import Fields, Items, OtherKind, TextOrItems, by_type
from specinfer.serve.fields.conversation import ConversationFields, Function
from specinfer.serve.fields.sampling import MAX_LOGPROBS, Prediction, TextPart
from specinfer.serve.http.api_error import ApiError


class RefusalPart(Fields):
    """A refusal of the assistant in an earlier turn."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the refusal."""
        return self.refusal


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
        message = {name: getattr(self, name) for name in _RENDERED if getattr(self, name) is not None}
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text} for part in self.content]
        if self.tool_calls is not None:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return message


_RENDERED: Final = ("role", "content", "name", "tool_call_id", "reasoning_content", "refusal")


class ChatTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


_Tool = Annotated[
    Annotated[ChatTool, Tag("Function")] | Annotated[OtherKind, Tag("Other")],
    by_type({"function": "Function"}, "Other"),
]


class FunctionName(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


_Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Mode")]
    | Annotated[NamedTool, Tag("Function")]
    | Annotated[OtherKind, Tag("Other")],
    by_type({None: "Mode", "function": "Function"}, "Other"),
]


class ChatFields(ConversationFields):
    """The request body: a conversation to answer."""

    messages: Items[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prediction: Prediction | None = None
    tools: Items[_Tool] | None = None
    tool_choice: _Choice | None = None
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
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                "max_tokens and max_completion_tokens are given, and differ; give one of them",
                param="max_tokens",
            )

    @property
    def functions(self) -> Sequence[Function]:
        """The functions in `tools`."""
        return [tool.function for tool in self.tools or () if isinstance(tool, ChatTool)]

    @property
    def chosen(self) -> ToolChoice:
        """The value of `tool_choice`; default: auto."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return ToolChoice("required", choice.function.name)
        return ToolChoice(choice if isinstance(choice, str) else "auto")

    def sampling_params(self, room: int, **constraints: Any) -> SamplingParams:
        """Convert to SamplingParams; see ConversationFields."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.params(
            max_tokens=room if max_tokens is None else max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prediction=None if self.prediction is None else self.prediction.text or None,
            **constraints,
        )


class Chat(ChoicesAnswer[ChatFields]):
    """The n answers to one conversation while they are generated."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, fields: ChatFields) -> None:
        fields.check()
        service.check_count(fields.n)
        super().__init__(service, fields)

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer as one object."""
        answers = [_Message() for _ in range(self._n)]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                answers[piece.pop("index")].add(piece)
        return self._object([one.choice(i) for i, one in enumerate(answers)]) | self._report()

    def _first(self, piece: dict[str, Any]) -> None:
        piece["delta"] = {"role": "assistant", "content": ""} | piece["delta"]

    async def _pieces(self) -> AsyncGenerator[dict[str, Any]]:
        fields, service = self._fields, self._service
        prompt = await ChatPrompt.of(service, fields, [message.rendered() for message in fields.messages])
        self._tally.prompt_tokens = len(prompt.token_ids)
        readers = [prompt.reader() for _ in range(self._n)]
        params = fields.sampling_params(service.room(prompt.token_ids, "messages"), **prompt.constraints)
        shown = params.visible_token_ids
        logprobs = [ChatLogprobs(fields.top_logprobs or 0, service.tokenizer, shown) for _ in readers]
        answers = service.answer([prompt.token_ids], [params], model=self._model, traced=bool(fields.trace))
        try:
            with prompt.blamed():
                async with aclosing(answers):
                    async for number, delta in answers:
                        self._tally.add(delta, number)
                        piece = self._piece(delta, readers[number], logprobs[number])
                        if delta.prompt_logprobs is not None and fields.prompt_logprobs is not None:
                            # Once for the prompt, and in a thread, because it is as long as the prompt.
                            reports = delta.prompt_logprobs if number == 0 else ()
                            prompt_logprobs = await asyncio.to_thread(
                                reported_prompt, reports, fields.prompt_logprobs
                            )
                            piece["prompt_logprobs"] = prompt_logprobs or None
                        if any(piece.values()) or fields.trace or "prompt_logprobs" in piece:
                            for one in self._split_end(piece, delta):
                                yield {"index": number} | one
        finally:
            self._tally.reasoning_tokens = sum(reader.reasoning_tokens for reader in readers)

    def _piece(self, delta: Delta, reader: AnswerReader, logprobs: ChatLogprobs) -> dict[str, Any]:
        fields = self._fields
        reason = delta.finish_reason
        message = _delta(reader.read(delta.text, len(delta.token_ids), last=reason is not None))
        called = reason is FinishReason.STOP and reader.called
        piece: dict[str, Any] = {
            "delta": message,
            "finish_reason": "tool_calls" if called else None if reason is None else reason.value,
            "logprobs": None,
        }
        if fields.logprobs:
            piece["logprobs"] = {"content": logprobs.add(delta), "refusal": None}
        if fields.trace:
            piece["trees"] = list(delta.trees)
        return piece

    def _split_end(self, piece: dict[str, Any], delta: Delta) -> list[dict[str, Any]]:
        """Split off a last token without text if the piece has log-probabilities; returns 1 or 2 pieces.

        Some clients join the tokens of a piece to get its text, which would contain the end token's name.
        """
        logprobs: list[dict[str, Any]] = [] if piece["logprobs"] is None else piece["logprobs"]["content"]
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


class _Message:
    """Joins the pieces of one answer."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        self._rest: dict[str, Any] = {"logprobs": None, "finish_reason": None}

    def add(self, piece: dict[str, Any]) -> None:
        """Append the next piece; `piece` is consumed."""
        delta = piece.pop("delta")
        for call in delta.pop("tool_calls", ()):
            calls = self._message.setdefault("tool_calls", [])
            if call.pop("index") == len(calls):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        for name, text in delta.items():
            self._message[name] = (self._message.get(name) or "") + text
        logprobs = piece.pop("logprobs")
        if logprobs is not None:
            if self._rest["logprobs"] is None:
                self._rest["logprobs"] = {"content": [], "refusal": None}
            self._rest["logprobs"]["content"].extend(logprobs["content"])
        if "trees" in piece:
            self._rest.setdefault("trees", []).extend(piece.pop("trees"))
        self._rest.update(piece)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the answer as a choice."""
        return {"index": index, "message": self._message} | self._rest


def _delta(found: list[Event]) -> dict[str, Any]:
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
