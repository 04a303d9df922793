"""Answers read piece by piece: their events, and the text and the calls in them."""

from collections.abc import Iterable, Sequence

from specinfer.request import Delta, FinishReason
from specinfer.serve.dialect import call_parser as parsing
from specinfer.serve.dialect.call_format import CallFormat, Tool
from specinfer.serve.dialect.call_parser import Content, Event, ReasoningPiece
from specinfer.serve.dialect.dialect import Dialect, call_parser

Calls = list[tuple[str, str]]  # name and arguments


def events_of(call_format: CallFormat, tools: Sequence[Tool], *pieces: str) -> list[Event]:
    """The events of an answer that comes in these pieces."""
    reader = call_parser(call_format, tools)
    return [event for piece in pieces for event in reader.feed(piece)] + reader.feed("", last=True)


def content_and_calls(events: Iterable[Event]) -> tuple[str, Calls]:
    """All the text, and the calls, which must come in order."""
    content, calls = "", Calls()
    open_call: int | None = None
    for event in events:
        match event:
            case Content(text):
                assert (open_call, bool(text)) == (None, True)
                content += text
            case parsing.CallStarted(index, call_id, name):
                assert (open_call, index, bool(call_id)) == (None, len(calls), True)
                open_call = index
                calls.append((name, ""))
            case parsing.ArgumentsPiece(index, text):
                assert (index, bool(text)) == (open_call, True)
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case parsing.CallEnded(index):
                assert index == open_call
                open_call = None
    assert open_call is None
    return content, calls


def said(dialect: Dialect, tools: Sequence[Tool], *text: str, inside: bool = False) -> tuple[str, str, Calls]:
    """Reasoning, content and calls of an answer that comes in these pieces."""
    reader = dialect.reader(tools, inside, lambda _: b"")
    deltas = [Delta("", text=piece) for piece in text]
    deltas.append(Delta("", finish_reason=FinishReason.STOP))
    events = [event for delta in deltas for event in reader.read(delta)]
    thoughts = "".join(one.text for one in events if isinstance(one, ReasoningPiece))
    return thoughts, *content_and_calls([one for one in events if not isinstance(one, ReasoningPiece)])
