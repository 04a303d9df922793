"""POST /v1/messages: answers to conversations, as in Anthropic's API."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import from_json

from specinfer.request import Delta, FinishReason
from specinfer.serve.api.answer import Event, GrowingAnswer, Part, Parts
from specinfer.serve.api.chat_prompt import build_prompt
from specinfer.serve.api.message_fields import MessageFields
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.call_parser import Event as Found
from specinfer.serve.http.api_error import ApiError, OwnNames

# Kind of a part -> type of its deltas, and the field that holds their text.
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
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


class Blocks(Parts):
    """The content blocks of one answer. With `show_reasoning` False, thinking blocks stay empty."""

    def __init__(self, *, show_reasoning: bool = True) -> None:
        super().__init__()
        self._show_reasoning = show_reasoning

    def _value(self, part: Part, complete: bool) -> dict[str, Any]:
        """Return the block with its text; incomplete arguments of a call are dropped."""
        match part.kind:
            case "reasoning":
                text = part.text if self._show_reasoning else ""
                return {"type": "thinking", "thinking": text, "signature": _SIGNATURE}
            case "text":
                return {"type": "text", "text": part.text}
            case "call":
                call = {"id": part.call_id, "name": part.name, "input": _input(part.text)}
                return {"type": "tool_use"} | call

    def _started(self, part: Part) -> list[Event]:
        block = self._value(part, complete=False)
        if part.kind == "reasoning":
            block["signature"] = ""
        return [{"type": "content_block_start", "index": part.index, "content_block": block}]

    def _grown(self, part: Part, text: str) -> list[Event]:
        if part.kind == "reasoning" and not self._show_reasoning:
            return []
        kind, field = _DELTAS[part.kind]
        return [{"type": "content_block_delta", "index": part.index, "delta": {"type": kind, field: text}}]

    def _ended(self, part: Part, complete: bool) -> list[Event]:
        end = {"type": "content_block_stop", "index": part.index}
        if part.kind != "reasoning":
            return [end]
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        return [{"type": "content_block_delta", "index": part.index, "delta": signature}, end]


def _input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; the text may be cut off."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:  # empty or not JSON
        return {}
    return found if isinstance(found, dict) else {}


class Messages(GrowingAnswer[MessageFields]):
    """One answer while it is generated."""

    names = _OWN_NAMES

    def __init__(self, service: Service, fields: MessageFields) -> None:
        fields = fields.for_template(service.chat.variables)
        super().__init__(service, fields, fields.conversation)
        if fields.max_tokens is None:
            raise ApiError(
                "max_tokens is required; give the maximum of tokens of the answer", param="max_tokens"
            )
        self._id = f"msg_{uuid.uuid4().hex}"
        shown = fields.thinking is None or fields.thinking.display != "omitted"
        self._blocks = Blocks(show_reasoning=shown)
        self._reasons: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}  # why the answer ended

    def _opening(self) -> list[Event]:
        """Return the message without text and end, which may be known already."""
        usage = self._usage() | {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": start}, {"type": "ping"}]

    def _grow(self, delta: Delta, found: Sequence[Found]) -> list[Event]:
        events = self._blocks.grow(found)
        if delta.finish_reason is not None:
            events += [*self._blocks.end(), *self._ending(delta)]
        return events

    def _finish(self) -> dict[str, Any]:
        return self._message(self._blocks.values()) | {"metrics": self._tally.metrics()}

    def _ending(self, delta: Delta) -> list[Event]:
        limit = self._fields.max_tokens or 0
        if delta.finish_reason is FinishReason.LENGTH:
            full = self._tally.completion_tokens < limit
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif delta.stopped_by is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._reader.called else "end_turn"
        self._reasons = {"stop_reason": reason, "stop_sequence": delta.stopped_by}
        usage = {"usage": self._usage(), "metrics": self._tally.metrics()}
        return [{"type": "message_delta", "delta": self._reasons} | usage, {"type": "message_stop"}]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return message | {"content": content} | self._reasons | {"usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        tally = self._tally
        marked = max((tokens for tokens, _ in self._params.cache_pins), default=0)
        created = max(0, marked - tally.cached_tokens)
        return {
            "input_tokens": tally.prompt_tokens - tally.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": tally.cached_tokens,
            "output_tokens": tally.completion_tokens,
            "output_tokens_details": {"thinking_tokens": tally.reasoning_tokens},
            "service_tier": "standard",
        }


async def count_tokens(service: Service, fields: MessageFields) -> dict[str, Any]:
    """The number of prompt tokens, as the usage of an answer would report it."""
    fields.check()
    fields = fields.for_template(service.chat.variables)
    try:
        prompt = await service.in_thread("messages", build_prompt, service, fields, fields.conversation)
    except ApiError as error:
        raise _OWN_NAMES.renamed(error) from None
    return {"input_tokens": len(prompt.token_ids)}
