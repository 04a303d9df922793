"""The text and the calls of an answer that is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specinfer.serve.dialect.reader import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    Content,
    Event,
    ReasoningPiece,
)


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
            case ReasoningPiece() | CallEnded():
                pass
    calls = zip(started, arguments, strict=True)
    return "".join(content), [Call(call.call_id, call.name, "".join(pieces)) for call, pieces in calls]
