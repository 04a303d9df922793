"""GrowingAnswer: the answer to one conversation, told as parts that open, grow and end."""

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
from specinfer.serve.dialect.reader import ArgumentsPiece, CallEnded, CallStarted, Content, Thought
from specinfer.serve.dialect.reader import Event as Found
from specinfer.serve.fields.conversation import ConversationFields
from specinfer.serve.http.api_error import ApiError, OwnNames

Event = dict[str, Any]
_Kind = Literal["thoughts", "text", "call"]
_Fields = TypeVar("_Fields", bound=ConversationFields)


@dataclass(eq=False, slots=True)
class Part:
    """Thoughts, a text or a call; the text of a call is its arguments."""

    kind: _Kind
    index: int  # its place among the parts
    call_id: str = ""
    name: str = ""  # of the function that is called
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class Parts(ABC):
    """The parts of one answer, in order; each has ended when the next one begins."""

    def __init__(self) -> None:
        self._over: list[dict[str, Any]] = []
        self._open: Part | None = None

    def values(self) -> list[dict[str, Any]]:
        """All parts so far, as JSON; one that may still grow is incomplete."""
        return [*self._over, *([] if self._open is None else [self._value(self._open, complete=False)])]

    def grow(self, found: Sequence[Found]) -> list[Event]:
        """Take in what more of the answer has in it; returns the events that tell it."""
        events: list[Event] = []
        for one in found:
            match one:
                case Thought(text):
                    events += [*self._within("thoughts"), *self._add(text)]
                case Content(text):
                    events += [*self._within("text"), *self._add(text)]
                case CallStarted(_, call_id, name):
                    events += self._begin("call", call_id, name)
                case ArgumentsPiece(_, text):
                    events += self._add(text)
                case CallEnded(_, complete):
                    events += self.end(complete=complete)
        return events

    def end(self, *, complete: bool = True) -> list[Event]:
        """End the part that is open, if there is one; returns the events of that."""
        if self._open is None:
            return []
        part, self._open = self._open, None
        self._over.append(self._value(part, complete))
        return self._ended(part, complete)

    def _within(self, kind: _Kind) -> list[Event]:
        """Have a part of that kind open; returns the events of what that ends and begins."""
        return [] if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: _Kind, call_id: str = "", name: str = "") -> list[Event]:
        ended = self.end()
        self._open = Part(kind, len(self._over), call_id, name)
        return ended + self._begun(self._open)

    def _add(self, text: str) -> list[Event]:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._grown(self._open, text)

    @abstractmethod
    def _value(self, part: Part, complete: bool) -> dict[str, Any]:
        """The part as the whole answer has it."""

    @abstractmethod
    def _begun(self, part: Part) -> list[Event]:
        """The events before its first text."""

    @abstractmethod
    def _grown(self, part: Part, text: str) -> list[Event]:
        """The events of more text."""

    @abstractmethod
    def _ended(self, part: Part, complete: bool) -> list[Event]:
        """The events behind its last text."""


class GrowingAnswer(ABC, Generic[_Fields]):
    """One request's answer, as it is made; raises ApiErrors in the endpoint's own names of fields."""

    names: ClassVar[OwnNames]
    announced: ClassVar[bool] = False  # whether a stream begins before anything is said

    def __init__(self, service: Service, fields: _Fields, messages: Sequence[Mapping[str, Any]]) -> None:
        self._service = service
        self._fields = fields
        self._messages = messages
        self._model = service.check_model(fields.model)
        self._tally = Tally(0)
        self._params = SamplingParams()  # until the prompt's length is known
        self._trees: list[Any] = []
        self._untold_trees: list[Any] = []  # that go with the next event

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async with aclosing(self._growth()) as growth:
            async for _ in growth:
                pass
        return self._finish()

    @abstractmethod
    def events(self) -> AsyncGenerator[str]:
        """The answer as the events of a stream."""

    async def _growth(self) -> AsyncGenerator[list[Event]]:
        """The events of each delta of the engine's, of some of them none."""
        fields, service = self._fields, self._service
        with self.names.told():
            prompt = await ChatPrompt.of(service, fields, self._messages)
            self._tally.prompt_tokens = len(prompt.token_ids)
            self._params = fields.sampling_params(service.room(prompt.token_ids, "messages"), **prompt.held)
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
            self._untold_trees.extend(delta.trees)
            if events:
                events[-1]["trees"], self._untold_trees = self._untold_trees, []
        return events

    @abstractmethod
    def _grow(self, delta: Delta, found: Sequence[Found], reader: AnswerReader) -> list[Event]:
        """Take in a delta and what was found in it; returns the events that tell it."""

    @abstractmethod
    def _finish(self) -> dict[str, Any]:
        """The whole answer, when it has ended."""
