"""The request body of POST /v1/messages, Anthropic's Messages API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag

from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.message_turns import (
    BETWEEN,
    CacheControl,
    Marked,
    MarkedText,
    Turn,
    check_turns,
    messages_of,
)
from specinfer.serve.dialect.call_format import ToolChoice
from specinfer.serve.fields.body import Fields, Items, OtherKind, TextOrItems, by_type
from specinfer.serve.fields.conversation import ConversationFields, Function
from specinfer.serve.fields.sampling import MAX_STOPS, Prediction, check_strings, text_of
from specinfer.serve.http.api_error import ApiError

_SECONDS: Final = {"5m": 300, "1h": 3600}
_MAX_MARKS: Final = 4
# The accounting line of a client as a whole block: its version, and a token that changes in every request.
_ACCOUNTING: Final = re.compile(r"x-[a-z-]+-billing-header:[^\n]*")


class CustomTool(Marked):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: Items[dict[str, Any]] | None = Field(
        None, description="The model reads them in the schema."
    )
    strict: bool | None = None

    @property
    def function(self) -> Function:
        """The function in the form of chat completions."""
        schema = self.input_schema
        if self.input_examples:
            schema = schema | {"examples": self.input_examples}
        return Function(name=self.name, description=self.description, parameters=schema, strict=self.strict)


# Tools of other types have schemas that only Anthropic's servers know.
_Tool = Annotated[
    Annotated[CustomTool, Tag("Custom")] | Annotated[OtherKind, Tag("Server")],
    by_type({None: "Custom", "custom": "Custom"}, "Server"),
]


class MessageToolChoice(Fields):
    """The `tool_choice` field: whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """The `thinking` field: whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, description="Maximum of tokens of thinking.")
    # summarized shows the full reasoning, omitted hides it
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Fields):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How much effort to spend, and the format of the answer."""

    effort: str | None = Field(None, description="Passed to the model's chat template.")
    format: OutputFormat | None = None


class MessageFields(ConversationFields):
    """A conversation to answer, or to count the tokens of."""

    format_field = "output_config.format"
    effort_field = "output_config.effort"
    budget_field = "thinking.budget_tokens"
    refused = {
        "n": "an answer is one message; send the request again with another seed",
        "trace": "the trees of steps come with /v1/chat/completions",
        "prompt_logprobs": "a message has no field for them; use /v1/completions",
        "response_format": "at this endpoint it is output_config.format; move it there",
        "parallel_tool_calls": "at this endpoint it is tool_choice.disable_parallel_tool_use; move it there",
        "mcp_servers": "this server does not call MCP servers; call them yourself, and send their tools",
        "container": "containers are not supported; remove it",
    }

    messages: Items[Turn]
    system: TextOrItems[MarkedText] | None = None
    cache_control: CacheControl | None = None  # as on the last block
    tools: Items[_Tool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the earlier name of output_config.format
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: Items[str] | None = None
    prediction: Prediction | None = None

    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None

    def check(self) -> None:
        """Raise ApiError for unsupported combinations of fields."""
        super().check()
        if self.stop and self.stop_sequences:
            raise ApiError("stop and stop_sequences are given; remove stop", param="stop")
        if not self.messages:
            raise ApiError("messages is empty; give at least one turn", param="messages")
        check_turns(self.messages)
        if self._given_budget is not None and self.thinking_token_budget not in (None, self._given_budget):
            raise ApiError(
                f"thinking allows {self._given_budget} tokens, and thinking_token_budget is "
                f"{self.thinking_token_budget}; give one of them",
                param="thinking_token_budget",
            )
        if len(self._marks) > _MAX_MARKS:
            raise ApiError(
                f"{len(self._marks)} blocks have cache_control; allowed: at most {_MAX_MARKS}; remove some",
                param="cache_control",
            )
        choice = self.tool_choice
        if choice is not None and (choice.name is None) == (choice.type == "tool"):
            raise ApiError(
                'tool_choice.name belongs to the type "tool", which needs it; add the name, or remove it',
                param="tool_choice",
            )
        edits = (self.context_management or {}).get("edits") or []
        for edit in edits if isinstance(edits, list) else [edits]:
            if not isinstance(edit, Mapping) or edit.get("keep") != "all":
                raise ApiError(
                    "context_management is not supported; remove it, and shorten messages",
                    param="context_management",
                )
        check_strings("stop_sequences", self.stop_sequences or [], MAX_STOPS)
        if self.prefill and (self.continue_final_message is False or self.add_generation_prompt):
            raise ApiError(
                "the last turn of messages is the assistant's, which the answer continues; remove "
                "continue_final_message and add_generation_prompt, or end with a turn of the user",
                param="messages",
            )
        if self.prefill and self.forms:
            raise ApiError(
                f"{self.forms[0]} applies to a whole answer, and the last turn of messages already "
                "starts it; remove one of them",
                param="messages",
            )

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages for the chat template, without a client's accounting line before them.

        Such a line changes in every request, so no cached prefix would reach behind it.
        """
        blocks = self.system or ""
        if not isinstance(blocks, str) and _ACCOUNTING.fullmatch(blocks[0].text.strip()):
            blocks = blocks[1:]
        system = text_of(blocks, BETWEEN)
        messages = [{"role": "system", "content": system}] if system else []
        return messages + messages_of(self.messages)

    @property
    def _marks(self) -> list[tuple[int, CacheControl]]:
        """Every mark, with the number of turns up to it."""
        system = () if isinstance(self.system, str | None) else self.system
        parts: list[tuple[int, Sequence[Any]]] = [(0, (*(self.tools or ()), *system))]
        parts += [(end, turn.blocks) for end, turn in enumerate(self.messages, 1)]
        marked = [(end, getattr(block, "cache_control", None)) for end, blocks in parts for block in blocks]
        marked.append((len(self.messages), self.cache_control))
        return [(end, mark) for end, mark in marked if mark is not None]

    @property
    def cached_prefixes(self) -> dict[int, int]:
        """Seconds that prefixes stay in the cache -> messages of the longest one.

        A mark on tools or on the system prompt covers at least the first message.
        """
        ends = {_SECONDS[mark.ttl or "5m"]: end for end, mark in self._marks}
        before = len(self.conversation) - len(messages_of(self.messages))
        return {
            seconds: max(1, before + len(messages_of(self.messages[:end]))) for seconds, end in ends.items()
        }

    @property
    def prefill(self) -> str:
        """The text that the answer continues: the last turn, if it is the assistant's; else empty."""
        last = self.messages[-1]
        return last.text if last.role == "assistant" else ""

    @property
    def chosen(self) -> ToolChoice:
        """The value of `tool_choice`; default: auto."""
        choice = self.tool_choice
        if choice is None or choice.type == "auto":
            return ToolChoice("auto")
        return ToolChoice("none") if choice.type == "none" else ToolChoice("required", choice.name)

    @property
    def parallel(self) -> bool:
        """Whether an answer may call several tools."""
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def budget(self) -> int | None:
        """Maximum of tokens of thinking that the request gives; disabled thinking has 0."""
        given = self._given_budget
        return self.thinking_token_budget if given is None else given

    @property
    def _given_budget(self) -> int | None:
        """The budget of `thinking`."""
        given = self.thinking
        if given is None:
            return None
        return 0 if given.type == "disabled" else given.budget_tokens

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """`output_config.format` in the shape of chat completions."""
        new = None if self.output_config is None else self.output_config.format
        form = new or self.output_format
        if form is None:
            return None
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def for_template(self, known: frozenset[str]) -> MessageFields:
        """Fit `thinking` to a chat template with the variables `known`; returns a copy.

        It sets the template's switch, if there is one.
        """
        update: dict[str, Any] = {"continue_final_message": True} if self.prefill else {}
        mode = None if self.thinking is None else self.thinking.type
        if mode in ("enabled", "disabled") and known & {"enable_thinking", "thinking"}:
            given = self.chat_template_kwargs or {}
            update["chat_template_kwargs"] = {"enable_thinking": mode == "enabled"} | given
        return self.model_copy(update=update)

    def sampling_params(self, room: int, **constraints: Any) -> SamplingParams:
        """SamplingParams for at most `room` tokens; see ConversationFields."""
        most, stop = min(self.max_tokens or room, room), self.stop_sequences or self.stop
        return super().sampling_params(room, max_tokens=most, stop=stop, **constraints)
