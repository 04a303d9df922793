"""What POST /v1/chat/completions takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from specinfer.serve.api_error import ApiError
from specinfer.serve.conversation_fields import ConversationFields
from specinfer.serve.fields import MOST_LOGPROBS, Fields, Items, TextOrItems


class TextPart(Fields):
    """A piece of a message; of text, as nothing else is read."""

    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    """What the assistant said where it did not want to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What it said."""
        return self.refusal


def part_kind(value: object) -> str:
    """Whether a piece of a message is a text or a refusal, as pydantic's tags; what is neither is a text."""
    return "Refusal" if isinstance(value, Mapping) and value.get("type") == "refusal" else "Text"


_Part = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")], Discriminator(part_kind)
]


class FunctionCall(Fields):
    """Which function, with arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # streams number them, and clients send them back


class ChatMessage(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrItems[_Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None

    def rendered(self) -> dict[str, Any]:
        """The message as `messages_for_template` takes it, which makes it ready for chat templates."""
        message = {name: getattr(self, name) for name in _RENDERED if getattr(self, name) is not None}
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text} for part in self.content]
        if self.tool_calls is not None:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return message


_RENDERED: Final = ("role", "content", "name", "tool_call_id", "reasoning_content", "refusal")


class Function(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments are held to the schema in any case


class Tool(Fields):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class Prediction(Fields):
    """The caller's guess of the answer."""

    type: Literal["content"]
    content: TextOrItems[TextPart]

    @property
    def text(self) -> str:
        """The guess."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatFields(ConversationFields):
    """A conversation that wants an answer."""

    messages: Items[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    prediction: Prediction | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: str | None = Field(None, description="Handed to the model's chat template.")

    def check(self) -> None:
        """Refuse what contradicts itself."""
        super().check()
        if not self.messages:
            raise ApiError("messages is empty; give at least one message", param="messages")
        for i, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":  # who may have called tools instead
                raise ApiError(
                    f"content is required of a message of role {message.role!r}; give a text",
                    param=f"messages[{i}].content",
                )
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true; add it", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                "max_tokens and max_completion_tokens are given, and differ; give one of them",
                param="max_tokens",
            )
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ApiError("tool_choice needs tools; add them", param="tool_choice")

    @property
    def described_tools(self) -> list[dict[str, Any]]:
        """The tools as they were given."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def chosen_tool(self) -> str | dict[str, Any] | None:
        """What `tool_choice` says; "auto" says nothing without tools."""
        choice = self.tool_choice if self.tools else None
        return choice if choice is None or isinstance(choice, str) else choice.model_dump()

    @property
    def effort(self) -> tuple[str, str | None]:
        """`reasoning_effort`."""
        return "reasoning_effort", self.reasoning_effort
