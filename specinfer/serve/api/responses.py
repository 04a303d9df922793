"""POST /v1/responses: input that is answered, and may be gone on from by the answer's id."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

from specinfer.request import Delta, FinishReason
from specinfer.serve.api.growing_answer import Event, GrowingAnswer, Part, Parts
from specinfer.serve.api.reports import chat_logprobs
from specinfer.serve.api.response_fields import ResponseFields, kept_items, output_messages
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.dialect import AnswerReader
from specinfer.serve.dialect.reader import Event as Found
from specinfer.serve.http.api_error import CALLER, ApiError, OwnNames, cut
from specinfer.serve.http.event_stream import typed_events

_MOST_BYTES: Final = 256 << 20  # of all responses together, about

_PREFIXES: Final = {"thoughts": "rs", "text": "msg", "call": "fc"}  # of items' ids
_GROWTH: Final = {"thoughts": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_Status = Literal["in_progress", "completed", "incomplete"]

_OWN_NAMES: Final = OwnNames(
    {
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        ".function": "",  # whose fields stand within a tool in chat completions
    },
    conversation="input",
)


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response that has ended, and what it was made of."""

    body: bytes  # the response, as JSON
    messages: tuple[Mapping[str, Any], ...]  # the conversation with its answer, without instructions
    items: tuple[Mapping[str, Any], ...]  # of its own input
    size: int


class ResponseStore:
    """Keeps up to `most` responses, in memory; the oldest leave first. Belongs to one event loop.

    They leave as well when all of them have more than `most_bytes`, but for the newest. A response belongs
    to the API key that it was asked with: for callers with another key there is none of that id.
    """

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._kept: dict[tuple[int, str], KeptResponse] = {}  # by the key's number and id; the oldest first
        self._size = 0

    def keep(
        self,
        name: str,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Keep a response that has ended, with the conversation it belongs to and the items of its input."""
        body = json.dumps(response, ensure_ascii=False).encode()
        # Messages are shared with the responses before: they are counted once too often, not too rarely.
        size = len(body) + sum(len(str(one)) for one in (*messages, *items))
        self._kept[CALLER.get().key, name] = KeptResponse(body, tuple(messages), tuple(items), size)
        self._size += size
        while len(self._kept) > self.most or (self._size > self._most_bytes and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def conversation(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """The messages that a response with this `previous_response_id` goes on from."""
        kept = self._kept.get((CALLER.get().key, name))
        if kept is None:
            raise ApiError(
                f"there is no response {cut(name)!r}: it was not stored, or has left; send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.messages

    def page(self, name: str, *, after: str | None, limit: int, order: str) -> dict[str, Any]:
        """Some items of a response's input, in OpenAI's shape of a list: those behind the one called `after`.

        Raises ApiError where there is no such response, or no such item in it.
        """
        items = list(self.kept(name).items)
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(
                    f"after is {cut(after)!r}, which is no item of this response's input", param="after"
                )
            items = items[ids.index(after) + 1 :]
        shown = items[:limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else "",
            "last_id": shown[-1]["id"] if shown else "",
            "has_more": len(items) > limit,
        }

    def forget(self, name: str) -> None:
        """Let a response go; raises ApiError where there is none of that id."""
        self.kept(name)
        self._drop((CALLER.get().key, name))

    def kept(self, name: str) -> KeptResponse:
        """The response of that id; raises ApiError where there is none."""
        kept = self._kept.get((CALLER.get().key, name))
        if kept is None:
            raise ApiError(
                f"there is no response {cut(name)!r}: it was not stored, or has left",
                status=404,
                code="response_not_found",
            )
        return kept

    def _drop(self, place: tuple[int, str]) -> None:
        self._size -= self._kept.pop(place).size


class Output(Parts):
    """All items of one response.

    Log-probabilities are told with the text that comes with them or next, and left out where thoughts or
    calls come. With no items at the end there is a message that says nothing.
    """

    def __init__(self, *, logprobs: bool) -> None:
        super().__init__()
        self._wants_logprobs = logprobs
        self._untold: list[dict[str, Any]] = []  # log-probabilities
        self._told: list[dict[str, Any]] = []  # those of the message that is open, or was last

    def take(self, found: Sequence[Found], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Take in what more of the answer says; returns the events that tell it."""
        self._untold += logprobs
        events = self.grow(found)
        if found or (self._open is not None and self._open.kind == "thoughts"):
            self._untold = []  # what brings nothing among thoughts belongs to a mark
        return events

    def close(self, *, complete: bool) -> list[Event]:
        """The events of the end."""
        events = [] if self._open is not None or self._over else self._within("text")
        if self._open is not None and self._open.kind == "text" and self._untold:
            events += self._add("")
        return events + self.end(complete=complete)

    def _value(self, part: Part, complete: bool) -> dict[str, Any]:
        return self._item(part, "completed" if complete else "incomplete")

    def _item(self, part: Part, status: _Status) -> dict[str, Any]:
        """The item as it stands in `output`; nothing sums thoughts up."""
        item: dict[str, Any] = {"id": _id(part), "status": status}
        begins = status == "in_progress"
        match part.kind:
            case "thoughts":
                content = [] if begins else [{"type": "reasoning_text", "text": part.text}]
                return item | {"type": "reasoning", "summary": [], "content": content}
            case "text":
                content = [] if begins else [self._content(part)]
                return item | {"type": "message", "role": "assistant", "content": content}
            case "call":
                call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return item | {"type": "function_call"} | call

    def _content(self, part: Part) -> dict[str, Any]:
        """What a message says."""
        told = list(self._told) if self._wants_logprobs else None
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": told}

    def _begun(self, part: Part) -> list[Event]:
        item = {"output_index": part.index, "item": self._item(part, "in_progress")}
        events: list[Event] = [{"type": "response.output_item.added"} | item]
        if part.kind == "text":
            self._told = []
            content = {"part": self._content(part)}
            events.append({"type": "response.content_part.added"} | _place(part) | content)
        return events

    def _grown(self, part: Part, text: str) -> list[Event]:
        event = {"type": f"response.{_GROWTH[part.kind]}.delta"} | _place(part) | {"delta": text}
        if part.kind == "text":
            event["logprobs"], self._untold = self._untold, []
            self._told += event["logprobs"]
        return [event]

    def _ended(self, part: Part, complete: bool) -> list[Event]:
        done: Event = {"type": f"response.{_GROWTH[part.kind]}.done"} | _place(part)
        if part.kind == "call":
            done |= {"arguments": part.text, "name": part.name}
        else:
            done["text"] = part.text
        events = [done]
        if part.kind == "text":
            done["logprobs"] = list(self._told) if self._wants_logprobs else []
            content = {"part": self._content(part)}
            events.append({"type": "response.content_part.done"} | _place(part) | content)
        item = {"output_index": part.index, "item": self._over[-1]}
        return [*events, {"type": "response.output_item.done"} | item]


def _id(part: Part) -> str:
    return f"{_PREFIXES[part.kind]}_{part.id}"


def _place(part: Part) -> dict[str, Any]:
    """Where an event's text belongs."""
    place = {"item_id": _id(part), "output_index": part.index}
    return place if part.kind == "call" else place | {"content_index": 0}


class Responses(GrowingAnswer[ResponseFields]):
    """One response, as it is made."""

    names = _OWN_NAMES
    announced = True

    def __init__(self, service: Service, fields: ResponseFields, store: ResponseStore) -> None:
        fields.check()
        self._store = store
        if fields.store and not store.most:
            raise ApiError("store is true, and this server keeps no responses; drop it", param="store")
        self._stored = fields.store is not False and bool(store.most)
        earlier = fields.previous_response_id
        before = () if earlier is None else store.conversation(earlier)
        fields.check_results(before)
        self._conversation = [*before, *fields.messages]
        instructions = [] if not fields.instructions else [{"role": "system", "content": fields.instructions}]
        super().__init__(service, fields, [*instructions, *self._conversation])
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._output = Output(logprobs=fields.logprobs)
        self._complete = True

    async def events(self) -> AsyncGenerator[str]:
        """The response as the events of a stream.

        They begin when the engine has taken the work: what it refuses is an error of its own, not an event.
        """
        numbers = itertools.count()

        def told(events: Iterable[Event]) -> str:
            return typed_events(one | {"sequence_number": next(numbers)} for one in events)

        begun = False
        try:
            async with aclosing(self._growth()) as growth:
                async for grown in growth:
                    if not begun:
                        begun = True
                        yield told(self._opening())
                    if grown:
                        yield told(grown)
            yield told(self._output.close(complete=self._complete))
        except ApiError as error:
            if not begun:
                raise
            yield told([{"type": "response.failed", "response": self._failed(error)}])
            return
        yield told([{"type": f"response.{self._status}", "response": self._finish()}])

    def _opening(self) -> list[Event]:
        response = self._object("in_progress", [])
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def _grow(self, delta: Delta, found: Sequence[Found], reader: AnswerReader) -> list[Event]:
        self._complete = delta.finish_reason is not FinishReason.LENGTH
        told = delta.logprobs if self._fields.logprobs else ()
        logprobs = chat_logprobs(told, self._fields.top_logprobs or 0, self._service.tokenizer)
        return self._output.take(found, logprobs)

    @property
    def _status(self) -> str:
        return "completed" if self._complete else "incomplete"

    def _finish(self) -> dict[str, Any]:
        """The response with its answer; kept, where it is to be."""
        self._output.close(complete=self._complete)  # unless a stream has told of it
        response = self._object(self._status, self._output.values())
        if self._complete:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._stored:
            answer = output_messages(response["output"])
            items = kept_items(self._fields.input)
            self._store.keep(self._id, response, [*self._conversation, *answer], items)
        return response

    def _failed(self, error: ApiError) -> dict[str, Any]:
        told = error.body["error"]
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._object("failed", self._output.values())
        return response | {"error": {"code": code, "message": told["message"]}, "store": False}

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
            "text": {"format": fields.text_format, "verbosity": "medium"},
            "tool_choice": _dumped(fields.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in fields.tools or ()],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
        }
        if status != "in_progress":
            response |= self._tally.report(steps=bool(fields.trace)) | {"usage": self._usage()}
            if fields.trace:
                response["trees"] = self._trees
        return response

    def _usage(self) -> dict[str, Any]:
        tally = self._tally
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": tally.cached_tokens,
                "cache_write_tokens": 0,  # counted where a caller pays to write; here nobody does
            },
            "output_tokens": tally.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
            "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        }


def _dumped(field: Any) -> Any:
    """A field as it was given."""
    return field.model_dump() if isinstance(field, BaseModel) else field
