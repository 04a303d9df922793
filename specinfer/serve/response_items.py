"""The items that a response's output is made of, and the events by which they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from specinfer.serve.growing_answer import Event, Part, Parts
from specinfer.serve.reader import Event as Found

_PREFIXES: Final = {"thoughts": "rs", "text": "msg", "call": "fc"}  # of items' ids
_GROWTH: Final = {"thoughts": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_Status = Literal["in_progress", "completed", "incomplete"]


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
