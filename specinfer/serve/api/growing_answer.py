"""GrowingAnswer: the answer to one conversation, sent as parts that open, grow and end."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.chat_prompt import ChatPrompt
from specinfer.serve.api.reports import Tally
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.dialect import AnswerReader
from specinfer.serve.dialect.reader import ArgumentsPiece, CallEnded, CallStarted, Content, ReasoningPiece
from specinfer.serve.dialect.reader import Event as Found
from specinfer.serve.fields.conversation import ConversationFields
from specinfer.serve.http.api_error import ApiError, OwnNames

Event = dict[str, Any]
_Kind = Literal["reasoning", "text", "call"]
_Fields = TypeVar("_Fields", bound=ConversationFields)


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


class GrowingAnswer(ABC, Generic[_Fields]):
    """The answer to one request while it is generated; ApiErrors have the endpoint's field names."""

    names: ClassVar[OwnNames]
    announced: ClassVar[bool] = False  # whether a stream starts before the first text

    def __init__(self, service: Service, fields: _Fields, messages: Sequence[Mapping[str, Any]]) -> None:
        self._service = service
        self._fields = fields
        self._messages = messages
        self._model = service.check_model(fields.model)
        self._tally = Tally(0)
        self._params = SamplingParams()  # until the prompt's length is known
        self._trees: list[Any] = []
        self._unsent_trees: list[Any] = []  # sent with the next event

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer as one object."""
        async with aclosing(self._growth()) as growth:
            async for _ in growth:
                pass
        return self._finish()

    @abstractmethod
    def events(self) -> AsyncGenerator[str]:
        """Yield the answer as stream events."""

    async def _growth(self) -> AsyncGenerator[list[Event]]:
        """Yield the stream events of each engine delta; some deltas have none."""
        fields, service = self._fields, self._service
        with self.names.applied():
            prompt = await ChatPrompt.of(service, fields, self._messages)
            self._tally.prompt_tokens = len(prompt.token_ids)
            self._params = fields.sampling_params(
                service.room(prompt.token_ids, "messages"), **prompt.constraints
            )
            reader = prompt.reader()
            answers = service.answer(
                *([prompt.token_ids], [self._params]),
                model=self._model,
                traced=bool(fields.trace),
                announced=self.announced,
            )
            with prompt.blamed():
                async with aclosing(answers):
                    async for _, delta in answers:
                        yield self._events_of(delta, reader)

    def _events_of(self, delta: Delta, reader: AnswerReader) -> list[Event]:
        self._tally.add(delta)
        if delta.finish_reason is FinishReason.ABORT:
            raise ApiError("the answer was cut off before its end", status=500)
        found = reader.read(delta.text, len(delta.token_ids), last=delta.finish_reason is not None)
        self._tally.reasoning_tokens = reader.reasoning_tokens
        events = self._grow(delta, found, reader)
        if self._fields.trace:
            self._trees.extend(delta.trees)
            self._unsent_trees.extend(delta.trees)
            if events:
                events[-1]["trees"], self._unsent_trees = self._unsent_trees, []
        return events

    @abstractmethod
    def _grow(self, delta: Delta, found: Sequence[Found], reader: AnswerReader) -> list[Event]:
        """Add a delta and its parsed events; returns the stream events."""

    @abstractmethod
    def _finish(self) -> dict[str, Any]:
        """Return the whole answer after its last delta."""
