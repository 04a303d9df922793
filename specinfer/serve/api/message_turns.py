"""Turns of the Messages API: their blocks, checks, and messages for a chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag

from specinfer.serve.fields.body import Fields, OtherKind, TextOrItems, by_type
from specinfer.serve.fields.sampling import TextPart, text_of
from specinfer.serve.http.api_error import ApiError, not_read

BETWEEN: Final = "\n"  # between the texts of one turn
_BLOCKS: Final = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class CacheControl(Fields):
    """The end of a prefix that stays in the cache longer than others."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Marked(Fields):
    """A block that may end a prefix to keep."""

    cache_control: CacheControl | None = None


class MarkedText(Marked, TextPart):
    """A text block."""


class ThinkingBlock(Fields):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Fields):
    """Encrypted reasoning of another server; it cannot be decrypted and is dropped."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Marked):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_ResultPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherKind, Tag("Other")],
    by_type({"text": "text"}, "Other"),
]


class ToolResultBlock(Marked):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrItems[_ResultPart] | None = None
    is_error: bool | None = Field(None, description="If true, the model reads Error: before the text.")


_Block = Annotated[
    Annotated[MarkedText, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherKind, Tag("Other")],
    by_type({name: name for name in _BLOCKS}, "Other"),
]
_OF_ROLE: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class Turn(Fields):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOrItems[_Block]

    @property
    def blocks(self) -> Sequence[Any]:
        """The content as a list of blocks."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content

    @property
    def text(self) -> str:
        """The turn's text blocks, joined."""
        return text_of([block for block in self.blocks if isinstance(block, TextPart)], BETWEEN)


def check_turns(turns: Sequence[Turn]) -> None:
    """Raise ApiError for a block its role may not have, and for a call or result without its counterpart."""
    called: set[str] = set()
    for i, turn in enumerate(turns):
        for j, block in enumerate(turn.blocks):
            where = f"messages[{i}].content[{j}]"
            allowed = _OF_ROLE[turn.role]
            if isinstance(block, OtherKind):
                raise _refusal(block, where, allowed)
            if block.type not in allowed:
                raise ApiError(
                    f"{where} is a {block.type} block of the role {turn.role}; allowed: {', '.join(allowed)}",
                    param=where,
                )
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock):
                _check_result(block, where, called)
    # Consecutive turns of one role are one message for the model.
    last = itertools.takewhile(lambda turn: turn.role == "assistant", reversed(turns))
    if kinds := {block.type for turn in last for block in turn.blocks} - {"text"}:
        raise ApiError(
            f"messages ends with a {min(kinds)} block of the assistant, and only text can be continued; add "
            "a turn of the user, or remove the block",
            param="messages",
        )


def _refusal(block: OtherKind, where: str, allowed: Sequence[str]) -> ApiError:
    return ApiError(
        f"{where} is of type {block.type[:100]!r}; allowed: {', '.join(allowed)}{not_read(block.type)}",
        param=where,
    )


def _check_result(block: ToolResultBlock, where: str, called: set[str]) -> None:
    if block.tool_use_id not in called:
        raise ApiError(
            f"{where}.tool_use_id is {block.tool_use_id[:100]!r}, which no tool_use block before it has; "
            "send the assistant's turn as well",
            param=f"{where}.tool_use_id",
        )
    if not isinstance(block.content, str):
        for k, part in enumerate(block.content or ()):
            if isinstance(part, OtherKind):
                raise _refusal(part, f"{where}.content[{k}]", ("text",))


def messages_of(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """The turns as messages for a chat template; consecutive turns of one role are merged."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        for block in turn.blocks:
            match block:
                case TextPart():
                    _add(messages, turn.role, "content", block.text)
                case ThinkingBlock():
                    _add(messages, turn.role, "reasoning_content", block.thinking)
                case ToolUseBlock():
                    call = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    calls = _message(messages, turn.role).setdefault("tool_calls", [])
                    calls.append({"id": block.id, "type": "function", "function": call})
                case ToolResultBlock():
                    messages.append(
                        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
                    )
    return messages


def _result(block: ToolResultBlock) -> str:
    text = text_of(block.content or "", BETWEEN)  # `check_turns` refuses parts of other kinds
    return f"Error: {text}" if block.is_error else text


def _message(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it has that role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    return messages[-1]


def _add(messages: list[dict[str, Any]], role: str, name: str, text: str) -> None:
    message = _message(messages, role)
    before = message.get(name)
    message[name] = f"{before}{BETWEEN}{text}" if before else text
