"""POST /v1/messages: answers conversations in the shape of Anthropic's API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final

from pydantic_core import from_json

from specinfer.request import FinishReason
from specinfer.serve.api_error import ApiError, OwnNames
from specinfer.serve.chat_prompt import ChatPrompt
from specinfer.serve.dialect import AnswerReader
from specinfer.serve.event_stream import event
from specinfer.serve.message_fields import MessageFields
from specinfer.serve.reader import ArgumentsPiece, CallEnded, CallStarted, Content, Thought
from specinfer.serve.reader import Event as Found
from specinfer.serve.reports import Tally
from specinfer.serve.service import Service
from specinfer.serve.work import Delta

Event = dict[str, Any]
# Type of a block -> type of its deltas, and the field that holds their text.
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
# Clients drop thinking blocks without a signature. The server does not check signatures.
_SIGNATURE: Final = "unsigned"

_OWN_NAMES: Final = OwnNames(
    {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        ".function.parameters": ".input_schema",
        ".function": "",
    },
    conversation="messages",
)


class Blocks:
    """The content blocks of one answer, in order; one block is open at a time.

    With `thoughts` False, thinking blocks stay empty.
    """

    def __init__(self, *, thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._over: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the block as it was opened
        self._texts: list[str] = []  # of the open block

    def blocks(self) -> list[dict[str, Any]]:
        """All blocks so far, the open one included."""
        return [*self._over, *([] if self._open is None else [self._grown(self._open)])]

    def grow(self, found: Sequence[Found]) -> list[Event]:
        """Add parsed pieces of the answer; returns the stream events for them."""
        events: list[Event] = []
        for one in found:
            match one:
                case Thought(text):
                    events += self._within({"type": "thinking", "thinking": "", "signature": ""})
                    events += self._told(text) if self._thoughts else []
                case Content(text):
                    events += [*self._within({"type": "text", "text": ""}), *self._told(text)]
                case CallStarted(_, call_id, name):
                    events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case ArgumentsPiece(_, text):
                    events += self._told(text)
                case CallEnded():
                    events += self.close()
        return events

    def close(self) -> list[Event]:
        """Close the open block; returns the events for that."""
        if self._open is None:
            return []
        index, block = len(self._over), self._open
        self._over.append(self._grown(block))
        self._open, self._texts = None, []
        end = {"type": "content_block_stop", "index": index}
        if block["type"] != "thinking":
            return [end]
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        return [{"type": "content_block_delta", "index": index, "delta": signature}, end]

    def _within(self, block: dict[str, Any]) -> list[Event]:
        """Open a block of that type unless one is open; returns the events for that."""
        same = self._open is not None and self._open["type"] == block["type"]
        return [] if same else self._begin(block)

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        ended = self.close()
        self._open = block
        return [*ended, {"type": "content_block_start", "index": len(self._over), "content_block": block}]

    def _told(self, text: str) -> list[Event]:
        assert self._open is not None
        self._texts.append(text)
        kind, field = _DELTAS[self._open["type"]]
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": len(self._over), "delta": delta}]

    def _grown(self, block: dict[str, Any]) -> dict[str, Any]:
        """The block with its text. Of arguments that were cut off, the complete ones are kept."""
        text = "".join(self._texts)
        match block["type"]:
            case "tool_use":
                return block | {"input": _input(text)}
            case "thinking":
                return block | {"thinking": text, "signature": _SIGNATURE}
        return block | {"text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; the text may be cut off."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:  # empty or not JSON
        return {}
    return found if isinstance(found, dict) else {}


class Messages:
    """One answer while it is generated."""

    def __init__(self, service: Service, fields: MessageFields) -> None:
        self._model = service.check_model(fields.model)
        self._fields = _checked(service, fields)
        if fields.max_tokens is None:
            raise ApiError(
                "max_tokens is required; say how many tokens the answer may have", param="max_tokens"
            )
        self._service = service
        self._id = f"msg_{uuid.uuid4().hex}"
        self._tally = Tally(0)
        shown = fields.thinking is None or fields.thinking.display != "omitted"
        self._blocks = Blocks(thoughts=shown)
        self._trees: list[Any] = []
        self._untold_trees: list[Any] = []  # not sent yet; they go with the next event
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def whole(self) -> dict[str, Any]:
        """The message in one piece."""
        async with aclosing(self._growth()) as growth:
            async for _ in growth:
                pass
        message = self._message(self._blocks.blocks()) | {"metrics": self._tally.metrics()}
        return message | ({"trees": self._trees} if self._fields.trace else {})

    async def events(self) -> AsyncGenerator[str]:
        """The message as the events of a stream.

        The stream begins with the engine's first delta: a request that the engine refuses gets an HTTP error.
        """
        begun = False
        async with aclosing(self._growth()) as growth:
            async for grown in growth:
                if not begun:
                    begun = True
                    yield _told([{"type": "message_start", "message": self._message([])}, {"type": "ping"}])
                if grown:
                    yield _told(grown)

    async def _growth(self) -> AsyncGenerator[list[Event]]:
        """The stream events of each engine delta; the list may be empty."""
        fields, service = self._fields, self._service
        try:
            prompt = await _prompt(service, fields)
            self._tally.prompt_tokens = len(prompt.token_ids)
            params = fields.sampling_params(service.room(prompt.token_ids, "messages"), **prompt.held)
            reader = prompt.reader()
            try:
                answers = service.answer([prompt.token_ids], [params], traced=bool(fields.trace))
                async with aclosing(answers):
                    async for _, delta in answers:
                        yield self._grown(delta, reader)
            except ApiError as error:
                raise prompt.blamed(error) from None
        except ApiError as error:
            raise _OWN_NAMES.of(error) from None

    def _grown(self, delta: Delta, reader: AnswerReader) -> list[Event]:
        reason = delta.finish_reason
        self._tally.add(delta)
        if reason is FinishReason.ABORT:
            raise ApiError("the answer was cut off before its end", status=500)
        found = reader.read(delta.text, len(delta.token_ids), last=reason is not None)
        self._tally.reasoning_tokens = reader.reasoning_tokens
        events = self._blocks.grow(found)
        if reason is not None:
            events += [*self._blocks.close(), *self._ending(delta, reader)]
        if self._fields.trace:
            self._trees.extend(delta.trees)
            self._untold_trees.extend(delta.trees)
            if events:
                events[-1]["trees"], self._untold_trees = self._untold_trees, []
        return events

    def _ending(self, delta: Delta, reader: AnswerReader) -> list[Event]:
        wanted = self._fields.max_tokens or 0
        if delta.finish_reason is FinishReason.LENGTH:
            full = self._tally.completion_tokens < wanted
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif delta.stopped_by is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if reader.called else "end_turn"
        self._ended = {"stop_reason": reason, "stop_sequence": delta.stopped_by}
        usage = {"usage": self._usage(), "metrics": self._tally.metrics()}
        return [{"type": "message_delta", "delta": self._ended} | usage, {"type": "message_stop"}]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return message | {"content": content} | self._ended | {"usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        tally = self._tally
        return {
            "input_tokens": tally.prompt_tokens - tally.cached_tokens,
            "cache_creation_input_tokens": 0,  # writing to the cache costs nothing here
            "cache_read_input_tokens": tally.cached_tokens,
            "output_tokens": tally.completion_tokens,
            "output_tokens_details": {"thinking_tokens": tally.reasoning_tokens},
            "service_tier": "standard",
        }


async def count_tokens(service: Service, fields: MessageFields) -> dict[str, Any]:
    """The number of prompt tokens, as the usage of an answer would report it."""
    service.check_model(fields.model)
    try:
        return {"input_tokens": len((await _prompt(service, _checked(service, fields))).token_ids)}
    except ApiError as error:
        raise _OWN_NAMES.of(error) from None


def _checked(service: Service, fields: MessageFields) -> MessageFields:
    fields.check()
    tokenizer, reasoning = service.tokenizer, service.dialect.reasoning
    return fields.for_template(tokenizer.template_variables, reasons=reasoning is not None)


async def _prompt(service: Service, fields: MessageFields) -> ChatPrompt:
    return await ChatPrompt.of(service, fields, fields.conversation)


def _told(events: Iterable[Event]) -> str:
    return "".join(f"event: {one['type']}\n{event(one)}" for one in events)
