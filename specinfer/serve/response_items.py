"""The items that a response's output is made of, and the events by which each of them grows."""

from __future__ import annotations

import uuid
from typing import Any, Literal

Event = dict[str, Any]  # without its number in the stream


class OutputMessage:
    """The item of what the assistant says; `index` is its place in the output."""

    def __init__(self, index: int, *, logprobs: bool) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] | None = [] if logprobs else None

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def item(self, status: Literal["in_progress", "completed", "incomplete"]) -> dict[str, Any]:
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
        item = {"output_index": self._index, "item": self.item("in_progress")}
        return [
            {"type": "response.output_item.added"} | item,
            {"type": "response.content_part.added"} | self._place() | {"part": self._part(empty=True)},
        ]

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """Take in more text; returns the event that says so."""
        self._texts.append(text)
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)
        told = {"delta": text, "logprobs": logprobs}
        return {"type": "response.output_text.delta"} | self._place() | told

    def closing(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        """The events behind its last text."""
        told = {"text": self.text, "logprobs": self._logprobs or []}
        item = {"output_index": self._index, "item": self.item(status)}
        return [
            {"type": "response.output_text.done"} | self._place() | told,
            {"type": "response.content_part.done"} | self._place() | {"part": self._part()},
            {"type": "response.output_item.done"} | item,
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, "content_index": 0}

    def _part(self, *, empty: bool = False) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": "" if empty else self.text,
            "annotations": [],
            "logprobs": None if self._logprobs is None else [] if empty else list(self._logprobs),
        }
