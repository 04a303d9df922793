"""The turns that POST /v1/messages takes, and the messages that chat templates know them as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from specinfer.serve.api_error import ApiError
from specinfer.serve.fields import Fields, TextOrItems

_BETWEEN: Final = "\n"  # the texts of a turn
_BLOCKS: Final = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Cached(Fields):
    """What may be marked as the end of a prefix; prefixes are found by their tokens, marked or not."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Cached):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None  # of an earlier answer


class ThinkingBlock(Fields):
    """What the model thought in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Fields):
    """Thoughts that another model's server has locked; nobody can read them here."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Cached):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class OtherBlock(Fields):
    """A block of another kind."""

    model_config = ConfigDict(extra="ignore")  # it is refused for what it is

    type: str

    def refusal(self, where: str, allowed: Sequence[str]) -> ApiError:
        """Why it is not taken."""
        return ApiError(
            f"{where} is of type {self.type[:100]!r}; allowed, as the model reads text: {', '.join(allowed)}",
            param=where,
        )


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return kind if isinstance(kind, str) and kind in _BLOCKS else "Other"


def _text_or_other(value: object) -> str:
    return "text" if _kind(value) == "text" else "Other"


_ResultPart = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("Other")], Discriminator(_text_or_other)
]


class ToolResultBlock(Cached):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrItems[_ResultPart] | None = None
    is_error: bool | None = Field(None, description="The model is told so: the text then begins with Error.")
    toolset_name: None = None


_Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_kind),
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
        """The content in blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    @property
    def text(self) -> str:
        """The texts of the turn."""
        return text_of(block for block in self.blocks if isinstance(block, TextBlock))


def text_of(content: str | Iterable[TextBlock]) -> str:
    """A text, or several as one."""
    return content if isinstance(content, str) else _BETWEEN.join(block.text for block in content)


def check_turns(turns: Sequence[Turn]) -> None:
    """Raise ApiError for a block where it has no place, and for a call or a result without the other."""
    called: set[str] = set()
    for i, turn in enumerate(turns):
        for j, block in enumerate(turn.blocks):
            where = f"messages[{i}].content[{j}]"
            allowed = _OF_ROLE[turn.role]
            if isinstance(block, OtherBlock):
                raise block.refusal(where, allowed)
            if block.type not in allowed:
                raise ApiError(
                    f"{where} is a {block.type} block of the role {turn.role}; allowed: {', '.join(allowed)}",
                    param=where,
                )
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock):
                _check_result(block, where, called)
    last = turns[-1]
    if last.role == "assistant" and (kinds := {block.type for block in last.blocks} - {"text"}):
        raise ApiError(
            f"messages end with a {min(kinds)} block, and only text can be gone on with; send what came of "
            "it in a turn of the user's, or drop it",
            param="messages",
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
            if isinstance(part, OtherBlock):
                raise part.refusal(f"{where}.content[{k}]", ("text",))


def messages_of(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """Turns as messages for a chat template; turns of one role in a row are one message."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        for block in turn.blocks:
            match block:
                case TextBlock():
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
    content = block.content or ""
    text = text_of(content if isinstance(content, str) else (p for p in content if isinstance(p, TextBlock)))
    return f"Error: {text}" if block.is_error else text


def _message(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message, or a new one where that is of another role."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    return messages[-1]


def _add(messages: list[dict[str, Any]], role: str, name: str, text: str) -> None:
    message = _message(messages, role)
    before = message.get(name)
    message[name] = f"{before}{_BETWEEN}{text}" if before else text
