"""What POST /v1/responses takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.fields import Fields, Items, SamplingFields

LOGPROBS: Final = "message.output_text.logprobs"  # what `include` may ask for
_FORMATS: Final = ("text", "json_object", "json_schema")
# Fields of OpenAI's API that cannot be honoured here, and what to do instead.
_REFUSED: Final = {
    "background": "answers are made while the client waits; ask without background, or with stream: true",
    "conversation": "conversations are not kept; send previous_response_id, or the messages as input",
    "prompt": "prompt templates are not kept; send their text as instructions and input",
    "context_management": "nothing is left out of a context; shorten the input",
    "max_tool_calls": "tools are not offered at this endpoint; drop it",
    "moderation": "nothing is moderated; drop it",
    "n": "a response is one answer; ask again, with another seed",
    "prompt_logprobs": "a response has no place for them; ask /v1/completions",
    "response_format": "at this endpoint it is text.format; move it there",
}


def _is_text(value: object) -> str:
    return "str" if isinstance(value, str) else "list"


def _part_kind(value: object) -> str:
    return "Refusal" if isinstance(value, Mapping) and value.get("type") == "refusal" else "Text"


def _item_kind(value: object) -> str:
    if not isinstance(value, Mapping) or value.get("type") == "message":
        return "Message"
    # A message may come without a type, and so may an item reference, which is an id alone.
    typeless = value.get("type") is None and ("role" in value or "id" not in value)
    return "Message" if typeless else "Other"


class TextPart(Fields):
    """A piece of a message; those of earlier answers come back with what was said about them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Fields):
    """What the assistant said where it did not want to answer."""

    type: Literal["refusal"]
    refusal: str


_Part = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")], Discriminator(_part_kind)
]


class MessageItem(Fields):
    """One message: the caller's, or an earlier answer as it was given."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("str")] | Annotated[Items[_Part], Tag("list")], Discriminator(_is_text)
    ]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class OtherItem(Fields):
    """An item that is no message."""

    model_config = ConfigDict(extra="ignore")  # it is refused for what it is

    type: str | None = None

    def refusal(self, where: str) -> ApiError:
        """Why it is not taken."""
        if self.type in (None, "item_reference"):
            reason = "items are not kept by their id; send the item itself, or previous_response_id"
        else:
            reason = "messages are all that this endpoint takes; send it as a message"
        return ApiError(f"{where} is of type {self.type or 'item_reference'}: {reason}", param=where)


_Item = Annotated[
    Annotated[MessageItem, Tag("Message")] | Annotated[OtherItem, Tag("Other")], Discriminator(_item_kind)
]


class TextOptions(Fields):
    """What form the text has."""

    format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with a schema")
    verbosity: Literal["medium"] | None = None  # the usual one; a model here knows no other


class ReasoningOptions(Fields):
    """How the model thinks before it answers."""

    effort: Any = None
    summary: Any = None


class ResponseFields(SamplingFields):
    """Input that wants an answer."""

    input: Annotated[
        Annotated[str, Tag("str")] | Annotated[Items[_Item], Tag("list")], Discriminator(_is_text)
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Whether previous_response_id may name the answer: true.")
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning: ReasoningOptions | None = None

    # Of tools nothing is offered yet; these are what asks for nothing.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    # Fields of OpenAI's API that change nothing here at these values, and are refused at others.
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None  # prefixes are found by their text; cache_salt keeps users apart
    safety_identifier: str | None = None

    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    max_tool_calls: Any = None
    moderation: Any = None

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise ApiError(
                "stream_options.include_usage is not offered here: usage comes with the last event; drop it",
                param="stream_options.include_usage",
            )
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False and (name, value) != ("n", 1):
                raise ApiError(f"{name} is not offered here: {reason}", param=name)
        if self.reasoning is not None:
            for name in ReasoningOptions.model_fields:
                if getattr(self.reasoning, name) is not None:
                    where = f"reasoning.{name}"
                    raise ApiError(
                        f"{where} is not offered here: the model thinks as it does; drop it", param=where
                    )
        if self.tools:
            raise ApiError(
                "tools are not offered at this endpoint; ask /v1/chat/completions, or drop them",
                param="tools",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                "tool_choice needs tools, which this endpoint has none of; drop it", param="tool_choice"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                f'top_logprobs needs include: ["{LOGPROBS}"]; add it, or drop top_logprobs',
                param="top_logprobs",
            )
        if (kind := self.text_format.get("type")) not in _FORMATS:
            raise ApiError(
                f"text.format has the type {kind!r}; allowed: {', '.join(_FORMATS)}", param="text.format"
            )
        if not self.input:
            raise ApiError("input is empty; give a text, or at least one message", param="input")
        for place, item in enumerate(self.input):
            if isinstance(item, OtherItem):
                raise item.refusal(f"input[{place}]")

    @property
    def logprobs(self) -> bool:
        """Whether the answer's log-probabilities are wanted."""
        return bool(self.include)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as chat templates know it, without instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [item.rendered() for item in self.input if isinstance(item, MessageItem)]

    @property
    def text_format(self) -> dict[str, Any]:
        """The form of the text, in this endpoint's shape."""
        given = None if self.text is None else self.text.format
        return {"type": "text"} if given is None else given

    def sampling_params(self, room: int) -> SamplingParams:
        """What these fields mean where an answer may have `room` tokens; raises ApiError."""
        form = self.text_format
        if form.get("type") == "json_schema":
            rest = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": rest}
        return self.params(
            max_tokens=room if self.max_output_tokens is None else self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            response_format=None if form == {"type": "text"} else form,
        )
