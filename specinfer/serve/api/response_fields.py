"""The request body of POST /v1/responses, and the conversion of its input items to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from specinfer.serve.api.chat import PART_KIND, RefusalPart
from specinfer.serve.fields.body import Fields, Items, TextOrItems
from specinfer.serve.fields.conversation import Choice, ConversationFields, Function, FunctionOrOther
from specinfer.serve.fields.sampling import MAX_LOGPROBS, text_of
from specinfer.serve.http.api_error import ApiError, not_read

_KINDS: Final = {
    "message": "Message",
    "reasoning": "Reasoning",
    "function_call": "Call",
    "function_call_output": "CallOutput",
}
_Status = Literal["in_progress", "completed", "incomplete"]

LOGPROBS: Final = "message.output_text.logprobs"  # a value of `include`
_FORMATS: Final = ("text", "json_object", "json_schema")


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else "message"
    if kind is None and isinstance(value, Mapping):
        # The type of a message is optional, and so is that of an item reference, which has only an id.
        kind = "message" if "role" in value or "id" not in value else "item_reference"
    return _KINDS.get(kind, "Other") if isinstance(kind, str) else "Other"


class ResponseText(Fields):
    """A text part of a message; parts of earlier answers have annotations and log-probabilities."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Part = Annotated[Annotated[ResponseText, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")], PART_KIND]


class _Item(Fields):
    """An input item."""

    id: str | None = None
    status: _Status | None = None


class MessageItem(_Item):
    """A message of the caller, or an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrItems[_Part]


class ReasoningTextPart(Fields):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """The reasoning before an earlier answer."""

    type: Literal["reasoning"]
    content: Items[ReasoningTextPart] | None = None
    summary: list[Any] | None = None  # no effect; the model reads the content
    encrypted_content: str | None = None


class CallItem(_Item):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrItems[ResponseText]


class OtherItem(Fields):
    """An item of another kind."""

    model_config = ConfigDict(extra="ignore")  # the error names the type only

    type: str | None = None

    def refusal(self, where: str) -> ApiError:
        """Return the error for this item."""
        if self.type in (None, "item_reference"):
            reason = "items cannot be referenced by id; send the item itself, or previous_response_id"
        else:
            reason = f"allowed: {', '.join(_KINDS)}; send it as a message{not_read(self.type)}"
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
    """Convert items to messages for chat templates.

    Reasoning, the text after it and the calls after that become one message of the assistant. Incomplete
    calls are dropped.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _turn(messages, "content", "tool_calls")["content"] = text_of(item.content)
            case MessageItem(role=role):
                messages.append({"role": role, "content": text_of(item.content)})
            case ReasoningItem():
                if reasoning := text_of(item.content or []):
                    turn = _turn(messages, "reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = reasoning
            case CallItem() if item.status != "incomplete":
                call = {"name": item.name, "arguments": item.arguments}
                calls = _turn(messages).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": call})
            case CallOutputItem():
                result = {"tool_call_id": item.call_id, "content": text_of(item.output)}
                messages.append({"role": "tool"} | result)
    return [message if "content" in message else message | {"content": ""} for message in messages]


def output_messages(output: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the items of an output to messages, as if a client sent them back."""
    return messages_of(_ITEMS.validate_python(list(output)))


def _turn(messages: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """Return the last message if it is the assistant's and lacks the fields `before`, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        messages.append({"role": "assistant"})
    return messages[-1]


class TextOptions(Fields):
    """The `text` field: the format of the text."""

    format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with a schema")
    verbosity: str = Field("medium", description="No effect: no model here has such a setting.")


class ReasoningOptions(Fields):
    """The `reasoning` field."""

    effort: str | None = Field(None, description="Passed to the model's chat template.")
    summary: str | None = Field(None, description="No effect: answers contain the full reasoning.")


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    @property
    def function(self) -> Function:
        """The function itself."""
        return self


class NamedFunction(Fields):
    """The function that the answer must call."""

    type: Literal["function"]
    name: str


class ResponseFields(ConversationFields):
    """The request body: input to answer."""

    format_field = "text.format"
    effort_field = "reasoning.effort"
    refused = {
        "prompt": "prompt templates are not stored; send the text as instructions and input",
        "n": "a response has one answer; send the request again with another seed",
        "trace": "the trees of steps come with /v1/chat/completions",
        "prompt_logprobs": "a response has no field for them; use /v1/completions",
        "response_format": "at this endpoint it is text.format; move it there",
    }

    input: TextOrItems[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(
        None, description="Whether to store the response for previous_response_id; default: true."
    )
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    include: Items[str] | None = Field(None, description=f"{LOGPROBS}; other values have no effect.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    reasoning: ReasoningOptions | None = None
    tools: Items[FunctionOrOther[FunctionTool]] | None = None
    tool_choice: Choice[NamedFunction] | None = None

    # No effect; returned in the response.
    prompt_cache_key: str | None = None  # all prefixes are cached; cache_salt separates users
    safety_identifier: str | None = None

    prompt: Any = None

    def check(self) -> None:
        """Raise ApiError for unsupported values and combinations of fields."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                f'top_logprobs needs include: ["{LOGPROBS}"]; add it, or remove top_logprobs',
                param="top_logprobs",
            )
        if (kind := self.text_format.get("type")) not in _FORMATS:
            raise ApiError(
                f"text.format has the type {kind!r}; allowed: {', '.join(_FORMATS)}", param="text.format"
            )
        if not self.input:
            raise ApiError("input is empty; give a text, or at least one message", param="input")
        for index, item in enumerate(self.items):
            if isinstance(item, OtherItem):
                raise item.refusal(f"input[{index}]")

    def check_results(self, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Raise ApiError for a result without its call earlier in the input or in `earlier`."""
        called = {call["id"] for message in earlier for call in message.get("tool_calls", ())}
        for index, item in enumerate(self.items):
            if isinstance(item, CallItem):
                called.add(item.call_id)
            elif isinstance(item, CallOutputItem) and item.call_id not in called:
                where = f"input[{index}].call_id"
                raise ApiError(
                    f"{where} is {item.call_id!r}, and no call before it has that id; send the function_call "
                    "item as well, or previous_response_id",
                    param=where,
                )

    @property
    def items(self) -> list[Item]:
        """The input items; none if the input is a text."""
        return [] if isinstance(self.input, str) else self.input

    @property
    def logprobs(self) -> bool:
        """True if the answer must contain log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as messages for chat templates, without instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.items)

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """`text.format` in the shape of chat completions."""
        form = self.text_format
        if form.get("type") != "json_schema":
            return None if form == {"type": "text"} else form
        return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}

    @property
    def text_format(self) -> dict[str, Any]:
        """The value of `text.format`; default: plain text."""
        given = None if self.text is None else self.text.format
        return {"type": "text"} if given is None else given
