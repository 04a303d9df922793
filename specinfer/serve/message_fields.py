"""What POST /v1/messages takes: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.chat_fields import Prediction
from specinfer.serve.conversation_fields import ConversationFields
from specinfer.serve.fields import Fields, Items, TextOrItems
from specinfer.serve.message_input import (
    Cached,
    TextBlock,
    Turn,
    check_turns,
    messages_of,
    text_of,
)

_SWITCHES: Final = ("enable_thinking", "thinking")  # what chat templates call the switch of thoughts
_USUAL_EFFORT: Final = "high"  # what Anthropic's API does where a request does not say
# Fields that have no place here, and what to do instead.
_REFUSED: Final = {
    "n": "an answer is one message; ask again, with another seed",
    "prompt_logprobs": "a message has no place for them; ask /v1/completions",
    "stop": "at this endpoint it is stop_sequences; move it there",
    "response_format": "at this endpoint it is output_config.format; move it there",
    "stream_options": "streams end with their usage; drop it",
    "parallel_tool_calls": "at this endpoint it is tool_choice.disable_parallel_tool_use; move it there",
    "mcp_servers": "nothing is called from here; call the servers yourself, and offer their tools as tools",
    "container": "nothing is run here; drop it",
}


class CustomTool(Cached):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: Items[dict[str, Any]] | None = Field(
        None, description="The model reads them in the schema."
    )
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they are written in any case
    defer_loading: Literal[False] | None = None
    allowed_callers: Items[Literal["direct"]] | None = None

    def described(self) -> dict[str, Any]:
        """The function in the shape of chat completions."""
        schema = self.input_schema
        if self.input_examples:
            schema = schema | {"examples": self.input_examples}
        given = {"description": self.description, "strict": self.strict}
        function = {"name": self.name, "parameters": schema}
        return {
            "type": "function",
            "function": function | {name: value for name, value in given.items() if value is not None},
        }


class ServerTool(Fields):
    """A tool that Anthropic's servers run, or know the schema of."""

    model_config = ConfigDict(extra="ignore")  # it is refused for what it is

    type: str


def _tool_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return "Custom" if kind is None or kind == "custom" else "Server"


_Tool = Annotated[
    Annotated[CustomTool, Tag("Custom")] | Annotated[ServerTool, Tag("Server")], Discriminator(_tool_kind)
]


class Choice(Fields):
    """Whether tools are to be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """Whether the model is to think before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, ge=1, description="Not held: max_tokens bounds thoughts and text."
    )
    display: Literal["summarized", "omitted"] | None = None  # nothing here sums thoughts up


class OutputFormat(Fields):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How the answer is to be."""

    effort: str | None = Field(None, description="Handed to the model's chat template.")
    format: OutputFormat | None = None


class MessageFields(ConversationFields):
    """A conversation that wants an answer, or to be counted."""

    messages: Items[Turn]
    system: TextOrItems[TextBlock] | None = None
    tools: Items[_Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # what output_config.format was called
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: Items[str] | None = None
    prediction: Prediction | None = None

    # Fields of Anthropic's API that change nothing here at these values, and are refused at others.
    cache_control: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    inference_geo: str | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value not in (None, []) and (name, value) != ("n", 1):
                raise ApiError(f"{name} is not offered here: {reason}", param=name)
        if not self.messages:
            raise ApiError("messages is empty; give at least one turn", param="messages")
        check_turns(self.messages)
        self._check_tools()
        for edit in (self.context_management or {}).get("edits") or ():
            if not isinstance(edit, Mapping) or edit.get("keep") != "all":
                raise ApiError(
                    "context_management is not offered: nothing of a context is left out; shorten messages",
                    param="context_management",
                )
        if self.prefill and self.forms:
            raise ApiError(
                f"{next(iter(self.forms))} holds a whole answer to its form, and messages end with a "
                "beginning of the answer; drop that turn, or the form",
                param="messages",
            )

    def _check_tools(self) -> None:
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, ServerTool):
                where = f"tools[{place}]"
                raise ApiError(
                    f"{where} is of type {tool.type[:100]!r}, which only Anthropic's servers know; drop it, "
                    "or give it a name and an input_schema, and run it yourself",
                    param=where,
                )
        choice = self.tool_choice
        if choice is None:
            return
        if (choice.name is None) == (choice.type == "tool"):
            raise ApiError(
                'tool_choice has a name where its type is "tool", and only there', param="tool_choice"
            )
        if not self.tools and choice.type in ("any", "tool"):
            raise ApiError("tool_choice needs tools; add them", param="tool_choice")

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All that is said, as chat templates know it, but the turn that the answer goes on from."""
        system = text_of(self.system or "")
        told = [{"role": "system", "content": system}] if system else []
        return told + messages_of(self.messages[:-1] if self.prefill else self.messages)

    @property
    def prefill(self) -> str:
        """How the answer begins: the last turn, where it is the assistant's."""
        last = self.messages[-1]
        return last.text if last.role == "assistant" else ""

    @property
    def described_tools(self) -> list[dict[str, Any]]:
        """The tools in the shape of chat completions."""
        return [tool.described() for tool in self.tools or () if isinstance(tool, CustomTool)]

    @property
    def chosen_tool(self) -> str | dict[str, Any] | None:
        """What `tool_choice` says, in that shape; it says nothing without tools."""
        choice = self.tool_choice
        if choice is None or not self.tools:
            return None
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name}}
        return "required" if choice.type == "any" else choice.type

    @property
    def parallel(self) -> bool:
        """Whether an answer may call several tools."""
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def effort(self) -> tuple[str, str | None]:
        """`output_config.effort`."""
        return "output_config.effort", None if self.output_config is None else self.output_config.effort

    @property
    def forms(self) -> Mapping[str, Any]:
        """The fields that ask for a form of the text, by name."""
        form = self._format
        return {**super().forms, **({} if form is None else {"output_config.format": form})}

    @property
    def form_params(self) -> dict[str, Any]:
        """The fields that ask for a form, as SamplingParams has them."""
        form = self._format
        if form is None:
            return dict(super().forms)
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        return {**super().forms, "response_format": {"type": "json_schema", "json_schema": schema}}

    @property
    def _format(self) -> OutputFormat | None:
        new = None if self.output_config is None else self.output_config.format
        return new or self.output_format

    def for_template(self, known: frozenset[str], *, reasons: bool) -> MessageFields:
        """The same as a chat template with these variables takes it; `reasons`: the model may think.

        `thinking` turns the template's switch. Thoughts cannot be asked of a model that has none, and their
        budget is a limit that no thoughts keep as well. Raises ApiError where they cannot be switched off.
        """
        update: dict[str, Any] = {}
        wanted = None if self.thinking is None else self.thinking.type
        switch = next((name for name in _SWITCHES if name in known), None)
        if wanted in ("enabled", "disabled") and switch is not None:
            given = self.chat_template_kwargs or {}
            update["chat_template_kwargs"] = {switch: wanted == "enabled"} | given
        elif wanted == "disabled" and reasons:
            raise ApiError(
                "thinking is disabled, and the model's chat template has no switch for that; drop it",
                param="thinking",
            )
        config = self.output_config
        if config is not None and config.effort == _USUAL_EFFORT and "reasoning_effort" not in known:
            update["output_config"] = config.model_copy(update={"effort": None})
        return self.model_copy(update=update)

    def sampling_params(self, room: int, **held: Any) -> SamplingParams:
        """What these fields mean where an answer may have `room` tokens and is held so; raises ApiError."""
        return self.params(
            max_tokens=min(self.max_tokens or room, room),
            stop=self.stop_sequences or None,
            response_format=self.form_params.get("response_format"),
            prediction=None if self.prediction is None else self.prediction.text or None,
            **held,
        )
