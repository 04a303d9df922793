"""The content blocks of an answer of /v1/messages, and the stream events that build them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import from_json

from specinfer.serve.tools.events import ArgumentsPiece, CallEnded, CallStarted, Content, Thought
from specinfer.serve.tools.events import Event as Found

Event = dict[str, Any]
# Type of a block -> type of its deltas, and the field that holds their text.
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
# Clients drop thinking blocks without a signature. The server does not check signatures.
_SIGNATURE: Final = "unsigned"


class Blocks:
    """The content blocks of one answer, in order; one block is open at a time.

    With `thoughts` False, thinking blocks stay empty.
    """

    def __init__(self, *, thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._over: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the block as it was opened
        self._texts: list[str] = []  # of the open block

    def blocks(self) -> list[dict[str, Any]]:
        """All blocks so far, the open one included."""
        return [*self._over, *([] if self._open is None else [self._grown(self._open)])]

    def grow(self, found: Sequence[Found]) -> list[Event]:
        """Add parsed pieces of the answer; returns the stream events for them."""
        events: list[Event] = []
        for one in found:
            match one:
                case Thought(text):
                    events += self._within({"type": "thinking", "thinking": "", "signature": ""})
                    events += self._told(text) if self._thoughts else []
                case Content(text):
                    events += [*self._within({"type": "text", "text": ""}), *self._told(text)]
                case CallStarted(_, call_id, name):
                    events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case ArgumentsPiece(_, text):
                    events += self._told(text)
                case CallEnded():
                    events += self.close()
        return events

    def close(self) -> list[Event]:
        """Close the open block; returns the events for that."""
        if self._open is None:
            return []
        index, block = len(self._over), self._open
        self._over.append(self._grown(block))
        self._open, self._texts = None, []
        end = {"type": "content_block_stop", "index": index}
        if block["type"] != "thinking":
            return [end]
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        return [{"type": "content_block_delta", "index": index, "delta": signature}, end]

    def _within(self, block: dict[str, Any]) -> list[Event]:
        """Open a block of that type unless one is open; returns the events for that."""
        same = self._open is not None and self._open["type"] == block["type"]
        return [] if same else self._begin(block)

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        ended = self.close()
        self._open = block
        return [*ended, {"type": "content_block_start", "index": len(self._over), "content_block": block}]

    def _told(self, text: str) -> list[Event]:
        assert self._open is not None
        self._texts.append(text)
        kind, field = _DELTAS[self._open["type"]]
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": len(self._over), "delta": delta}]

    def _grown(self, block: dict[str, Any]) -> dict[str, Any]:
        """The block with its text. Of arguments that were cut off, the complete ones are kept."""
        text = "".join(self._texts)
        match block["type"]:
            case "tool_use":
                return block | {"input": _input(text)}
            case "thinking":
                return block | {"thinking": text, "signature": _SIGNATURE}
        return block | {"text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; the text may be cut off."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:  # empty or not JSON
        return {}
    return found if isinstance(found, dict) else {}
