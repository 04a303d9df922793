"""Events: what is found in an answer as it grows, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a tool, number `index` of the answer, from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments, as the model wrote them: together they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call's arguments are over; `complete` is False when they break off, or are no JSON."""

    index: int
    complete: bool = True


Event = Thought | Content | CallStarted | ArgumentsPiece | CallEnded


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; `arguments` are JSON text."""

    call_id: str
    name: str
    arguments: str


def content_and_calls(events: Iterable[Event]) -> tuple[str, list[Call]]:
    """All the text for the reader, and all the calls, of an answer that is over."""
    content: list[str] = []
    started: list[CallStarted] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case CallStarted():
                started.append(event)
                arguments.append([])
            case ArgumentsPiece(index, text):
                arguments[index].append(text)
            case Thought() | CallEnded():
                pass
    calls = zip(started, arguments, strict=True)
    return "".join(content), [Call(call.call_id, call.name, "".join(pieces)) for call, pieces in calls]
