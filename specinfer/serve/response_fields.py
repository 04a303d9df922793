"""What POST /v1/responses takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.fields import MOST_LOGPROBS, ConversationFields, Fields, Items, TextOrItems
from specinfer.serve.response_input import CallItem, CallOutputItem, Item, OtherItem, messages_of
from specinfer.serve.tools.tool import Function, ToolChoice

LOGPROBS: Final = "message.output_text.logprobs"  # what `include` may ask for
_FORMATS: Final = ("text", "json_object", "json_schema")


def _tool_kind(value: object) -> str:
    return "Function" if isinstance(value, Mapping) and value.get("type") == "function" else "Other"


class TextOptions(Fields):
    """What form the text has."""

    format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with a schema")
    verbosity: Literal["medium"] | None = None  # the usual one; a model here knows no other


class ReasoningOptions(Fields):
    """How the model thinks before it answers."""

    effort: str | None = Field(None, description="Handed to the model's chat template.")
    summary: Any = None


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class OtherTool(Fields):
    """A tool of another kind."""

    model_config = ConfigDict(extra="ignore")  # it is refused for what it is

    type: str


_Tool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")], Discriminator(_tool_kind)
]


class NamedFunction(Fields):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class ResponseFields(ConversationFields):
    """Input that wants an answer."""

    format_field = "text.format"
    refused = {
        "prompt": "prompt templates are not kept; send their text as instructions and input",
        "n": "a response is one answer; ask again, with another seed",
        "prompt_logprobs": "a response has no place for them; ask /v1/completions",
        "response_format": "at this endpoint it is text.format; move it there",
    }

    input: TextOrItems[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Whether previous_response_id may name the answer: true.")
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    # Reasoning is told as it is, so there is no encrypted copy to include.
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    reasoning: ReasoningOptions | None = None
    tools: Items[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None

    # They change nothing, and are given back.
    prompt_cache_key: str | None = None  # prefixes are found by their text; cache_salt keeps users apart
    safety_identifier: str | None = None

    prompt: Any = None

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        if self.reasoning is not None and self.reasoning.summary is not None:
            raise ApiError(
                "reasoning.summary is not offered here: thoughts come as they are; drop it",
                param="reasoning.summary",
            )
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherTool):
                where = f"tools[{place}]"
                raise ApiError(
                    f"{where} is of type {tool.type}: functions are the only tools here; drop it", param=where
                )
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ApiError("tool_choice needs tools; add them", param="tool_choice")
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

    def check_results(self, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Raise ApiError for the result of a call that is neither in the input before it nor in `earlier`."""
        called = {call["id"] for message in earlier for call in message.get("tool_calls", ())}
        for place, item in enumerate(self.input):
            if isinstance(item, CallItem):
                called.add(item.call_id)
            elif isinstance(item, CallOutputItem) and item.call_id not in called:
                where = f"input[{place}].call_id"
                raise ApiError(
                    f"{where} is {item.call_id!r}, and no call before it has that id; send the function_call "
                    "item as well, or previous_response_id",
                    param=where,
                )

    @property
    def logprobs(self) -> bool:
        """Whether the answer's log-probabilities are wanted."""
        return LOGPROBS in (self.include or ())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as chat templates know it, without instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)

    @property
    def functions(self) -> Sequence[Function]:
        """Those of the tools."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def chosen(self) -> ToolChoice:
        """What `tool_choice` says; without tools it says nothing."""
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            return ToolChoice("required", choice.name)
        return ToolChoice(choice or "auto")

    @property
    def effort(self) -> tuple[str, str | None]:
        """`reasoning.effort`."""
        return "reasoning.effort", None if self.reasoning is None else self.reasoning.effort

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """`text.format` in the shape of chat completions."""
        form = self.text_format
        if form.get("type") != "json_schema":
            return None if form == {"type": "text"} else form
        return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}

    @property
    def text_format(self) -> dict[str, Any]:
        """The form of the text, in this endpoint's shape."""
        given = None if self.text is None else self.text.format
        return {"type": "text"} if given is None else given

    def sampling_params(self, room: int, **held: Any) -> SamplingParams:
        """As ConversationFields says."""
        return self.params(
            max_tokens=room if self.max_output_tokens is None else self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **held,
        )
