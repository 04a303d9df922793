"""The items that a response's output is made of, and the events by which they grow."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from specinfer.serve.reader import ArgumentsPiece, CallEnded, CallStarted, Content, Thought
from specinfer.serve.reader import Event as Found

Event = dict[str, Any]  # without its number in the stream
_Ended = Literal["completed", "incomplete"]
_Kind = TypeVar("_Kind", bound="_Item")


class Output:
    """All items of one response: each is over when the next one begins.

    Log-probabilities are told with the text that comes with them or next, and left out where thoughts or
    calls come. With no items at the end there is a message that says nothing.
    """

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs
        self._untold: list[dict[str, Any]] = []  # log-probabilities
        self._over: list[dict[str, Any]] = []
        self._open: _Item | None = None

    def items(self) -> list[dict[str, Any]]:
        """What is in it so far; an item that may still grow is incomplete."""
        return [*self._over, *([] if self._open is None else [self._open.item("incomplete")])]

    def grow(self, found: Sequence[Found], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Take in what more of the answer says; returns the events that tell it."""
        events: list[Event] = []
        self._untold += logprobs
        for one in found:
            match one:
                case Thought(text):
                    events += [*self._within(ReasoningItem), self._told(text)]
                case Content(text):
                    events += [*self._within(MessageItem), self._told(text)]
                case CallStarted(_, call_id, name):
                    events += self._begin(CallItem(self._next, call_id, name))
                case ArgumentsPiece(_, text):
                    events.append(self._told(text))
                case CallEnded(_, complete):
                    events += self._end("completed" if complete else "incomplete")
        if found or isinstance(self._open, ReasoningItem):  # what brings nothing there belongs to a mark
            self._untold = []
        return events

    def close(self, status: _Ended) -> list[Event]:
        """The events of the end."""
        events: list[Event] = []
        if self._open is None and not self._over:
            events += self._within(MessageItem)
        if isinstance(self._open, MessageItem) and self._untold:
            events.append(self._told(""))
        return events + self._end(status)

    @property
    def _next(self) -> int:
        return len(self._over) + (self._open is not None)

    def _within(self, kind: type[_Kind]) -> list[Event]:
        """Have an item of that kind open; returns the events of what that ends and begins."""
        return [] if isinstance(self._open, kind) else self._begin(kind(self._next))

    def _begin(self, item: _Item) -> list[Event]:
        ended = self._end("completed")
        if isinstance(item, MessageItem) and self._logprobs:
            item.logprobs = []
        self._open = item
        return ended + item.opening()

    def _end(self, status: _Ended) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._over.append(item.item(status))
        return item.closing(status)

    def _told(self, text: str) -> Event:
        assert self._open is not None
        event = self._open.grow(text)
        if not isinstance(self._open, MessageItem):
            return event
        logprobs, self._untold = self._untold, []
        if self._open.logprobs is not None:
            self._open.logprobs += logprobs
        return event | {"logprobs": logprobs}


class _Item(ABC):
    """One item of an output, which grows; `index` is its place there."""

    prefix: str
    delta: str  # the event of its growth

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: Literal["in_progress"] | _Ended) -> dict[str, Any]:
        """The item as it stands in `output`."""

    def opening(self) -> list[Event]:
        """The events before its first text."""
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self._index, "item": item}]

    def grow(self, text: str) -> Event:
        """Take in more text; returns the event that says so."""
        self._texts.append(text)
        return {"type": f"response.{self.delta}.delta"} | self._place() | {"delta": text}

    def closing(self, status: _Ended) -> list[Event]:
        """The events behind its last text."""
        item = {"output_index": self._index, "item": self.item(status)}
        return [
            {"type": f"response.{self.delta}.done"} | self._place() | self._whole(),
            {"type": "response.output_item.done"} | item,
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, "content_index": 0}

    def _whole(self) -> dict[str, Any]:
        """What the event says that tells all of its text."""
        return {"text": self.text}


class ReasoningItem(_Item):
    """What the model thinks before it answers."""

    prefix = "rs"
    delta = "reasoning_text"

    def item(self, status: Literal["in_progress"] | _Ended) -> dict[str, Any]:
        """The thoughts as they stand in `output`; nothing sums them up."""
        content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": self.text}]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class MessageItem(_Item):
    """What the assistant says."""

    prefix = "msg"
    delta = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[dict[str, Any]] | None = None  # where they are wanted

    def item(self, status: Literal["in_progress"] | _Ended) -> dict[str, Any]:
        """The message as it stands in `output`."""
        content = [] if status == "in_progress" else [self._part()]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def opening(self) -> list[Event]:
        """The events before its first text."""
        part = {"type": "response.content_part.added"} | self._place() | {"part": self._part()}
        return [*super().opening(), part]

    def closing(self, status: _Ended) -> list[Event]:
        """The events behind its last text."""
        text, item = super().closing(status)
        part = {"type": "response.content_part.done"} | self._place() | {"part": self._part()}
        return [text, part, item]

    def _whole(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": list(self.logprobs or [])}

    def _part(self) -> dict[str, Any]:
        told = None if self.logprobs is None else list(self.logprobs)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": told}


class CallItem(_Item):
    """A call of a function; its text is the arguments."""

    prefix = "fc"
    delta = "function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call = {"call_id": call_id, "name": name}

    def item(self, status: Literal["in_progress"] | _Ended) -> dict[str, Any]:
        """The call as it stands in `output`."""
        return (
            {"id": self.id, "type": "function_call"} | self._call | {"arguments": self.text, "status": status}
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index}

    def _whole(self) -> dict[str, Any]:
        return {"arguments": self.text, "name": self._call["name"]}
