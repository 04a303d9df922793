"""POST /v1/responses: answers that a later request can continue by id."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

from specinfer.request import Delta, FinishReason
from specinfer.serve.api.answer import Event, GrowingAnswer, Part, Parts
from specinfer.serve.api.reports import ChatLogprobs
from specinfer.serve.api.response_fields import ResponseFields, output_messages
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.call_parser import Event as Found
from specinfer.serve.http.api_error import CALLER, ApiError, OwnNames, cut
from specinfer.serve.http.event_stream import typed_events

_GONE: Final = "there is no response {!r}: it was not stored, or was dropped"
_MAX_BYTES: Final = 256 << 20  # approximate total of all responses

_PREFIXES: Final = {"reasoning": "rs", "text": "msg", "call": "fc"}  # prefixes of item ids
_GROWTH: Final = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_Status = Literal["in_progress", "completed", "incomplete"]

_OWN_NAMES: Final = OwnNames(
    {
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        ".function": "",  # chat completions nest these fields in the tool
    },
    conversation="input",
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response with its conversation."""

    body: bytes  # the response, as JSON
    messages: tuple[Mapping[str, Any], ...]  # the conversation with its answer, without instructions
    size: int


class ResponseStore:
    """Stores up to `max_count` responses in memory and drops the oldest first. Belongs to one event loop.

    It also drops the oldest if all together exceed `max_bytes`, but keeps the newest. A response can be read
    with the API key of its request only.
    """

    def __init__(self, max_count: int, max_bytes: int = _MAX_BYTES) -> None:
        self.max_count = max_count
        self._max_bytes = max_bytes
        self._responses: dict[tuple[int, str], StoredResponse] = {}  # by API key and id; oldest first
        self._size = 0

    def keep(self, name: str, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
        """Store a finished response with its conversation."""
        body = json.dumps(response, ensure_ascii=False).encode()
        # Messages shared with earlier responses are counted again, so the size is an upper bound.
        size = len(body) + sum(len(str(one)) for one in messages)
        self._responses[CALLER.get().key, name] = StoredResponse(body, tuple(messages), size)
        self._size += size
        while len(self._responses) > self.max_count or (
            self._size > self._max_bytes and len(self._responses) > 1
        ):
            self._drop(next(iter(self._responses)))

    def conversation(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """Return the messages that a request with this `previous_response_id` continues; raises ApiError."""
        found = self._responses.get((CALLER.get().key, name))
        if found is None:
            raise ApiError(
                f"{_GONE.format(cut(name))}; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.messages

    def forget(self, name: str) -> None:
        """Delete a response; raises ApiError if the id is unknown."""
        self.get(name)
        self._drop((CALLER.get().key, name))

    def get(self, name: str) -> StoredResponse:
        """Return the response with that id; raises ApiError if it is unknown."""
        found = self._responses.get((CALLER.get().key, name))
        if found is None:
            raise ApiError(_GONE.format(cut(name)), status=404, code="response_not_found")
        return found

    def _drop(self, key: tuple[int, str]) -> None:
        self._size -= self._responses.pop(key).size


class Output(Parts):
    """The output items of one response.

    Log-probabilities are sent with the text of their tokens or the next text, and dropped for reasoning and
    calls. An output without items gets an empty message at the end.
    """

    def __init__(self, *, logprobs: bool) -> None:
        super().__init__()
        self._logprobs = logprobs
        self._unsent: list[dict[str, Any]] = []  # log-probabilities not sent yet
        self._sent: list[dict[str, Any]] = []  # log-probabilities of the open or last message

    def take(self, found: Sequence[Found], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add parsed events and log-probabilities; returns the stream events."""
        self._unsent += logprobs
        events = self.grow(found)
        if found or (self._open is not None and self._open.kind == "reasoning"):
            self._unsent = []  # a token without text in reasoning is a delimiter
        return events

    def close(self, *, complete: bool) -> list[Event]:
        """Close the output; returns the last stream events."""
        events = [] if self._open is not None or self._finished else self._within("text")
        if self._open is not None and self._open.kind == "text" and self._unsent:
            events += self._add("")
        return events + self.end(complete=complete)

    def _value(self, part: Part, complete: bool) -> dict[str, Any]:
        return self._item(part, "completed" if complete else "incomplete")

    def _item(self, part: Part, status: _Status) -> dict[str, Any]:
        """Return the item as in `output`; the summary of reasoning is always empty."""
        item: dict[str, Any] = {"id": _id(part), "status": status}
        starts = status == "in_progress"
        match part.kind:
            case "reasoning":
                content = [] if starts else [{"type": "reasoning_text", "text": part.text}]
                return item | {"type": "reasoning", "summary": [], "content": content}
            case "text":
                content = [] if starts else [self._content(part)]
                return item | {"type": "message", "role": "assistant", "content": content}
            case "call":
                call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return item | {"type": "function_call"} | call

    def _content(self, part: Part) -> dict[str, Any]:
        """Return the content part of a message."""
        logprobs = list(self._sent) if self._logprobs else None
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _started(self, part: Part) -> list[Event]:
        item = {"output_index": part.index, "item": self._item(part, "in_progress")}
        events: list[Event] = [{"type": "response.output_item.added"} | item]
        if part.kind == "text":
            self._sent = []
            content = {"part": self._content(part)}
            events.append({"type": "response.content_part.added"} | _indices(part) | content)
        return events

    def _grown(self, part: Part, text: str) -> list[Event]:
        event = {"type": f"response.{_GROWTH[part.kind]}.delta"} | _indices(part) | {"delta": text}
        if part.kind == "text":
            event["logprobs"], self._unsent = self._unsent, []
            self._sent += event["logprobs"]
        return [event]

    def _ended(self, part: Part, complete: bool) -> list[Event]:
        done: Event = {"type": f"response.{_GROWTH[part.kind]}.done"} | _indices(part)
        if part.kind == "call":
            done |= {"arguments": part.text, "name": part.name}
        else:
            done["text"] = part.text
        events = [done]
        if part.kind == "text":
            done["logprobs"] = list(self._sent) if self._logprobs else []
            content = {"part": self._content(part)}
            events.append({"type": "response.content_part.done"} | _indices(part) | content)
        item = {"output_index": part.index, "item": self._finished[-1]}
        return [*events, {"type": "response.output_item.done"} | item]


def _id(part: Part) -> str:
    return f"{_PREFIXES[part.kind]}_{part.id}"


def _indices(part: Part) -> dict[str, Any]:
    """Return the index fields of an event."""
    indices = {"item_id": _id(part), "output_index": part.index}
    return indices if part.kind == "call" else indices | {"content_index": 0}


class Responses(GrowingAnswer[ResponseFields]):
    """One response while it is generated."""

    names = _OWN_NAMES
    opens_early = True

    def __init__(self, service: Service, fields: ResponseFields, store: ResponseStore) -> None:
        self._store = store
        if fields.store and not store.max_count:
            raise ApiError("store is true, but this server stores no responses; remove it", param="store")
        self._stored = fields.store is not False and bool(store.max_count)
        earlier = fields.previous_response_id
        before = () if earlier is None else store.conversation(earlier)
        fields.check_results(before)
        self._conversation = [*before, *fields.messages]
        instructions = [] if not fields.instructions else [{"role": "system", "content": fields.instructions}]
        super().__init__(service, fields, [*instructions, *self._conversation])
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._output = Output(logprobs=fields.logprobs)
        self._logprobs: ChatLogprobs | None = None  # made with the first delta
        self._complete = True
        self._numbers = itertools.count()  # of events

    def _written(self, events: list[Event]) -> str:
        return typed_events(one | {"sequence_number": next(self._numbers)} for one in events)

    def _opening(self) -> list[Event]:
        response = self._object("in_progress", [])
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def _closing(self) -> str:
        events = self._output.close(complete=self._complete)
        return self._written([*events, {"type": f"response.{self._status}", "response": self._finish()}])

    def _grow(self, delta: Delta, found: Sequence[Found]) -> list[Event]:
        self._complete = delta.finish_reason is not FinishReason.LENGTH
        if self._logprobs is None and self._fields.logprobs:
            top, shown = self._fields.top_logprobs or 0, self._params.visible_token_ids
            self._logprobs = ChatLogprobs(top, self._service.tokenizer, shown)
        return self._output.take(found, [] if self._logprobs is None else self._logprobs.add(delta))

    @property
    def _status(self) -> str:
        return "completed" if self._complete else "incomplete"

    def _finish(self) -> dict[str, Any]:
        """Return the finished response, and store it unless `store` is false."""
        self._output.close(complete=self._complete)  # no effect after a stream
        response = self._object(self._status, self._output.values())
        if self._complete:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._stored:
            answer = output_messages(response["output"])
            self._store.keep(self._id, response, [*self._conversation, *answer])
        return response

    def _failed(self, error: ApiError) -> list[Event]:
        message = error.body["error"]["message"]
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._object("failed", self._output.values())
        response |= {"error": {"code": code, "message": message}, "store": False}
        return [{"type": "response.failed", "response": response}]

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        fields, params = self._fields, self._params
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": None,
            "metadata": fields.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": fields.effort, "summary": None},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": self._stored,
            "temperature": params.temperature,
            "text": {
                "format": fields.text_format,
                "verbosity": fields.text.verbosity if fields.text else "medium",
            },
            "tool_choice": _dumped(fields.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in fields.functions],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
        }
        if status != "in_progress":
            response |= {"usage": self._usage(), "metrics": self._tally.metrics()}
        return response

    def _usage(self) -> dict[str, Any]:
        tally = self._tally
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": tally.cached_tokens,
                "cache_write_tokens": 0,  # for servers that bill cache writes
            },
            "output_tokens": tally.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
            "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        }


def _dumped(field: Any) -> Any:
    """Return a field as JSON."""
    return field.model_dump() if isinstance(field, BaseModel) else field
