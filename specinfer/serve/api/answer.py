"""EndpointAnswer: the answer to a request, whole or as a stream; Parts: an answer as parts."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.chat_prompt import build_prompt
from specinfer.serve.api.reports import Tally
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.call_parser import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    Content,
    ReasoningPiece,
)
from specinfer.serve.dialect.call_parser import Event as Found
from specinfer.serve.dialect.dialect import AnswerReader
from specinfer.serve.fields.conversation import ConversationFields
from specinfer.serve.fields.sampling import SamplingFields
from specinfer.serve.http.api_error import ApiError, OwnNames
from specinfer.serve.http.event_stream import typed_events

Event = dict[str, Any]
Prompts = tuple[Sequence[tuple[int, ...]], Sequence[SamplingParams]]  # token ids and parameters of each
_Kind = Literal["reasoning", "text", "call"]
_Fields = TypeVar("_Fields", bound=SamplingFields)
_Conversation = TypeVar("_Conversation", bound=ConversationFields)


class EndpointAnswer(ABC, Generic[_Fields]):
    """The answer to one request while it is generated: each delta of the engine becomes events.

    `fields` have been checked. ApiErrors have the endpoint's field names.
    """

    names: ClassVar[OwnNames | None] = None
    opens_early: ClassVar[bool] = False  # whether a stream opens before the first delta

    def __init__(self, service: Service, fields: _Fields) -> None:
        self._fields = fields.with_defaults(service.sampling)
        service.check_count(fields.n)
        self._service = service
        known = (*service.models, *service.adapters)
        self._model = fields.model if fields.model in known else service.models[0]
        self._n = fields.n or 1
        self._tally = Tally(0, n=self._n)
        self._has_tools = False
        self._is_over = False  # True if the engine's later deltas are not needed

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer as one object."""
        async with aclosing(self._steps()) as steps:
            async for events in steps:
                self._keep(events or [])
        return self._finish()

    async def events(self) -> AsyncGenerator[str]:
        """Yield the answer as stream events; the first one may be empty.

        It comes when the engine has admitted the request: a request that is refused gets an HTTP error.
        """
        started = False
        try:
            async with aclosing(self._steps()) as steps:
                async for events in steps:
                    if not started and (events is not None or self.opens_early):
                        started, events = True, [*self._opening(), *(events or ())]
                    if events is None:
                        yield ""
                    elif events:
                        yield self._written(events)
            if closing := self._closing():
                yield closing
        except ApiError as error:
            if not started or not (failed := self._failed(error)):
                raise
            yield self._written(failed)

    async def _steps(self) -> AsyncGenerator[list[Event] | None]:
        """Yield the events of each delta, possibly none; None when the engine has admitted the request."""
        try:
            prompts, params = await self._prepare()
            self._tally.prompt_tokens = sum(map(len, prompts))
            answers = self._service.answer(
                prompts, params, model=self._model, traced=bool(self._fields.trace)
            )
            async with aclosing(answers):
                async for number, delta in answers:
                    self._tally.add(delta, number)
                    yield None if delta.is_empty else await self._take(number, delta)
                    if self._is_over:
                        return  # closing `answers` aborts the work
        except ApiError as error:
            if self._has_tools and error.body["error"]["param"] == "grammar":
                error.body["error"]["param"] = "tools"  # the grammar of their calls
            raise (self.names.renamed(error) if self.names else error) from None

    async def _converse(
        self, fields: ConversationFields, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[int, ...], SamplingParams, list[AnswerReader]]:
        """Return the prompt of a conversation, its parameters, and a reader of each answer."""
        service = self._service
        prompt = await service.in_thread("messages", build_prompt, service, fields, messages)
        self._has_tools = prompt.has_tools
        room = service.room(prompt.token_ids, "messages")
        readers = [prompt.reader() for _ in range(self._n)]
        return prompt.token_ids, fields.sampling_params(room, **prompt.constraints), readers

    @abstractmethod
    async def _prepare(self) -> Prompts:
        """Return the prompts and their parameters; raises ApiError."""

    @abstractmethod
    async def _take(self, number: int, delta: Delta) -> list[Event]:
        """Add a delta of completion `number`; returns its events."""

    @abstractmethod
    def _finish(self) -> dict[str, Any]:
        """Return the whole answer after its last delta."""

    def _keep(self, events: list[Event]) -> None:
        """Keep events for the whole answer, unless `_take` does."""

    def _written(self, events: list[Event]) -> str:
        """Write events as text of a stream."""
        return typed_events(events)

    def _opening(self) -> list[Event]:
        """Return the events before the first ones of a stream."""
        return []

    def _closing(self) -> str:
        """Return the end of a stream, after the last delta."""
        return ""

    def _failed(self, error: ApiError) -> list[Event]:
        """Return the events for an error within a stream; without any it is raised."""
        return []


@dataclass(eq=False, slots=True)
class Part:
    """One part: reasoning, text or a tool call; the text of a call is its arguments."""

    kind: _Kind
    index: int  # index among the parts
    call_id: str = ""
    name: str = ""  # name of the called function
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class Parts(ABC):
    """The parts of one answer, in order; each ends before the next one starts."""

    def __init__(self) -> None:
        self._finished: list[dict[str, Any]] = []
        self._open: Part | None = None

    def values(self) -> list[dict[str, Any]]:
        """Return all parts so far as JSON; the open part is incomplete."""
        return [*self._finished, *([] if self._open is None else [self._value(self._open, complete=False)])]

    def grow(self, found: Sequence[Found]) -> list[Event]:
        """Add parsed events; returns the stream events for them."""
        events: list[Event] = []
        for one in found:
            match one:
                case ReasoningPiece(text):
                    events += [*self._within("reasoning"), *self._add(text)]
                case Content(text):
                    events += [*self._within("text"), *self._add(text)]
                case CallStarted(_, call_id, name):
                    events += self._start("call", call_id, name)
                case ArgumentsPiece(_, text):
                    events += self._add(text)
                case CallEnded(_, complete):
                    events += self.end(complete=complete)
        return events

    def end(self, *, complete: bool = True) -> list[Event]:
        """End the open part, if there is one; returns its stream events."""
        if self._open is None:
            return []
        part, self._open = self._open, None
        self._finished.append(self._value(part, complete))
        return self._ended(part, complete)

    def _within(self, kind: _Kind) -> list[Event]:
        """Make sure that a part of that kind is open; returns the stream events."""
        return [] if self._open is not None and self._open.kind == kind else self._start(kind)

    def _start(self, kind: _Kind, call_id: str = "", name: str = "") -> list[Event]:
        ended = self.end()
        self._open = Part(kind, len(self._finished), call_id, name)
        return ended + self._started(self._open)

    def _add(self, text: str) -> list[Event]:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._grown(self._open, text)

    @abstractmethod
    def _value(self, part: Part, complete: bool) -> dict[str, Any]:
        """Return the part as JSON for the whole answer."""

    @abstractmethod
    def _started(self, part: Part) -> list[Event]:
        """Return the events that open a part."""

    @abstractmethod
    def _grown(self, part: Part, text: str) -> list[Event]:
        """Return the events for more text."""

    @abstractmethod
    def _ended(self, part: Part, complete: bool) -> list[Event]:
        """Return the events that close a part."""


class GrowingAnswer(EndpointAnswer[_Conversation]):
    """The answer to a conversation as parts."""

    def __init__(
        self, service: Service, fields: _Conversation, messages: Sequence[Mapping[str, Any]]
    ) -> None:
        super().__init__(service, fields)
        self._messages = messages

    async def _prepare(self) -> Prompts:
        token_ids, self._params, [self._reader] = await self._converse(self._fields, self._messages)
        return [token_ids], [self._params]

    async def _take(self, number: int, delta: Delta) -> list[Event]:
        if delta.finish_reason is FinishReason.ABORT:
            raise ApiError("the answer was cut off before its end", status=500)
        found = self._reader.read(delta)
        self._tally.reasoning_tokens = self._reader.reasoning_tokens
        return self._grow(delta, found)

    @abstractmethod
    def _grow(self, delta: Delta, found: Sequence[Found]) -> list[Event]:
        """Add a delta and its parsed events; returns the stream events."""
