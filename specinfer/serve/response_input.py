"""The items that a response's input is made of, and the messages that they are."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from specinfer.serve.api_error import ApiError
from specinfer.serve.chat import RefusalPart, part_kind
from specinfer.serve.fields import Fields, Items, TextOrItems

_KINDS: Final = {
    "message": "Message",
    "reasoning": "Reasoning",
    "function_call": "Call",
    "function_call_output": "CallOutput",
}
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_Status = Literal["in_progress", "completed", "incomplete"]


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else "message"
    if kind is None and isinstance(value, Mapping):
        # A message may come without a type, and so may an item reference, which is an id alone.
        kind = "message" if "role" in value or "id" not in value else "item_reference"
    return _KINDS.get(kind, "Other") if isinstance(kind, str) else "Other"


class TextPart(Fields):
    """A piece of a message; those of earlier answers come back with what was said about them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Part = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")], Discriminator(part_kind)
]


class MessageItem(Fields):
    """One message: the caller's, or an earlier answer as it was given."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrItems[_Part]
    id: str | None = None
    status: _Status | None = None
    phase: None = None


class ThoughtPart(Fields):
    """A piece of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Fields):
    """What the model thought before an earlier answer."""

    type: Literal["reasoning"]
    content: Items[ThoughtPart] | None = None
    summary: Annotated[Items[Any], Field(max_length=0)] | None = None  # nothing here sums thoughts up
    encrypted_content: None = None
    id: str | None = None
    status: _Status | None = None


class CallItem(Fields):
    """A call of a function that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    # Of the client's own class, under its name and the API's.
    caller: None = None
    namespace: None = None
    async_: None = None
    asynchronous: None = Field(None, alias="async")


class CallOutputItem(Fields):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrItems[TextPart]
    id: str | None = None
    status: _Status | None = None


class OtherItem(Fields):
    """An item of another kind."""

    model_config = ConfigDict(extra="ignore")  # it is refused for what it is

    type: str | None = None

    def refusal(self, where: str) -> ApiError:
        """Why it is not taken."""
        if self.type in (None, "item_reference"):
            reason = "items are not kept by their id; send the item itself, or previous_response_id"
        else:
            reason = f"allowed: {', '.join(_KINDS)}; send it as a message"
        return ApiError(f"{where} is of type {self.type or 'item_reference'}: {reason}", param=where)


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_item_kind),
]
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as the messages that chat templates know.

    Thoughts, what was said then and the calls behind it are one message of the assistant's. A call that broke
    off was never made.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _turn(messages, "content", "tool_calls")["content"] = _text(item.content)
            case MessageItem(role=role):
                messages.append({"role": role, "content": _text(item.content)})
            case ReasoningItem():
                if thoughts := _text(item.content or []):
                    turn = _turn(messages, "reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = thoughts
            case CallItem() if item.status != "incomplete":
                call = {"name": item.name, "arguments": item.arguments}
                calls = _turn(messages).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": call})
            case CallOutputItem():
                result = {"tool_call_id": item.call_id, "content": _text(item.output)}
                messages.append({"role": "tool"} | result)
    return [message if "content" in message else message | {"content": ""} for message in messages]


def kept_items(given: str | Iterable[Item]) -> list[dict[str, Any]]:
    """An input's items as they are listed later: each with an id and a status, texts as lists of parts."""
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    return [_kept(item) for item in items]


def _kept(item: Item) -> dict[str, Any]:
    kind = item.type or "message"
    kept = {"status": "completed", **item.model_dump(exclude_none=True, by_alias=True), "type": kind}
    kept.setdefault("id", f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}")
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = {"type": "output_text", "text": item.content, "annotations": []}
        kept["content"] = [part if item.role == "assistant" else {"type": "input_text", "text": item.content}]
    if isinstance(item, ReasoningItem):
        kept.setdefault("summary", [])
    return kept


def output_messages(output: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of an output as messages, as if they were sent back."""
    return messages_of(_ITEMS.validate_python(list(output)))


def _turn(messages: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """The assistant's message that is being made, or a new one where the last has one of these fields."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | Iterable[TextPart | RefusalPart | ThoughtPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
