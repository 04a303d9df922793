"""ConversationFields: the fields that all endpoints with messages share, and the functions in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import Field, Tag

from specinfer.errors import RequestError, naming, shown
from specinfer.grammar.lark import json_rule
from specinfer.grammar.library_vocabulary import fault_and_warnings
from specinfer.sampling_params import SamplingParams
from specinfer.serve.dialect.call_format import Tool, ToolChoice
from specinfer.serve.fields.body import Fields, OtherKind, by_type
from specinfer.serve.fields.sampling import SamplingFields
from specinfer.serve.http.api_error import ApiError, cut
from specinfer.structured_output import StructuredOutput, schema_source, structured_output

_FORMS: Final = ("regex", "choice", "grammar")  # fields for forms other than JSON
_LENGTHS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # the first one given holds
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MAX_TOOLS = 128  # as in OpenAI's API; compiling a schema takes some milliseconds
_Item = TypeVar("_Item")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Fields):
    """A function as described by a request."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments always follow the schema


# A tool, or one of another server; and a choice among tools.
FunctionOrOther = Annotated[
    Annotated[_Item, Tag("Function")] | Annotated[OtherKind, Tag("Other")],
    by_type({"function": "Function"}, "Other"),
]
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Mode")]
    | Annotated[_Item, Tag("Function")]
    | Annotated[OtherKind, Tag("Other")],
    by_type({None: "Mode", "function": "Function"}, "Other"),
]


@naming("tools")
def read_tools(functions: Sequence[Function]) -> tuple[Tool, ...]:
    """Convert functions to tools.

    Raises RequestError, which names the index, if two functions have one name, and if a schema is malformed
    or has no valid arguments.
    """
    if len(functions) > _MAX_TOOLS:
        raise RequestError(f"tools has {len(functions)} tools; allowed: at most {_MAX_TOOLS}; remove some")
    tools: dict[str, Tool] = {}
    for index, function in enumerate(functions):
        where, name = f"tools[{index}].function", function.name
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{where}.name is {shown(name, 80)}; allowed: 1 to 128 letters, digits and any of _ . : -"
            )
        if name in tools:
            raise RequestError(f"{where}.name is {name!r}, like an earlier one's; rename it")
        strict = function.strict is True
        with naming(f"{where}.parameters"):
            parameters = _parameters(f"{where}.parameters", function.parameters, strict)
        tools[name] = Tool(name, parameters, function.description, strict)
    return tuple(tools.values())


def _parameters(where: str, given: Mapping[str, Any] | None, strict: bool) -> Mapping[str, Any]:
    """Return the schema with type object; raises RequestError if it cannot be compiled."""
    if given is None:
        return _NO_PARAMETERS
    schema_source(where, given)
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"{where} has the type {shown(kind, 80)}; allowed: object, because arguments have names"
        )
    schema = {**given, "type": "object"}
    try:
        fault, _ = fault_and_warnings(f"start: {json_rule(schema, strict=strict)}")
    except RequestError as error:
        raise RequestError(f"{where} cannot be used: {error}") from None
    if fault:
        hint = "change or drop that part of the schema" + (", or leave out strict" if strict else "")
        raise RequestError(f"{where} cannot be used: {fault}; {hint}")
    return schema


class ConversationFields(SamplingFields):
    """Fields of a conversation, except its messages."""

    format_field: ClassVar[str] = "response_format"  # field for the JSON schema of the answer
    effort_field: ClassVar[str] = "reasoning_effort"  # field for the reasoning effort
    budget_field: ClassVar[str] = "thinking_token_budget"  # field for the budget of thinking

    tools: Any = None  # each endpoint has its own shape of these two
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Whether the template opens the assistant's turn; default: true."
    )
    continue_final_message: bool | None = Field(
        None, description="Whether the answer continues the last message instead."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether a begin-of-text token precedes the rendered template; default: false."
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="Maximum of tokens of thinking; 0 ends it at once, -1: no maximum."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the model's chat template."
    )

    @property
    def cached_prefixes(self) -> Mapping[int, int]:
        """Seconds that prefixes stay in the cache -> their messages; only one endpoint has marks."""
        return {}

    @property
    def functions(self) -> Sequence[Function]:
        """The functions that `tools` describes."""
        return [tool.function for tool in self.tools or () if not isinstance(tool, OtherKind)]

    @property
    def chosen(self) -> ToolChoice:
        """The value of `tool_choice`; default: auto."""
        choice: Any = self.tool_choice or "auto"
        name = None if isinstance(choice, str) else choice.name
        return ToolChoice(choice if name is None else "required", name)

    @property
    def left_out(self) -> list[str]:
        """Types of the tools that are not functions: tools of other servers, which the model does not see."""
        return [tool.type for tool in self.tools or () if isinstance(tool, OtherKind)]

    @property
    def parallel(self) -> bool:
        """Whether an answer may call several tools."""
        return self.parallel_tool_calls is not False

    @property
    def effort(self) -> str | None:
        """Reasoning effort: the value of the field that `effort_field` names."""
        value: Any = self
        for name in self.effort_field.split("."):
            value = None if value is None else getattr(value, name)
        return None if value is None else str(value)

    @property
    def budget(self) -> int | None:
        """Maximum of tokens of thinking that the request gives; -1: none."""
        return self.thinking_token_budget

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """The JSON format of the answer, in the shape of `response_format`; None for any text."""
        return None if self.response_format == {"type": "text"} else self.response_format

    @property
    def forms(self) -> list[str]:
        """Names of the given fields that constrain the form of the text."""
        given = [name for name in _FORMS if getattr(self, name) is not None]
        return given if self.answer_format is None else [*given, self.format_field]

    def check(self) -> None:
        """Raise ApiError for fields that contradict each other."""
        super().check()
        if isinstance(self.tool_choice, OtherKind):
            raise ApiError(
                f"tool_choice is of type {cut(self.tool_choice.type)!r}, and this server has only functions; "
                "name a function, or remove it",
                param="tool_choice",
            )
        if self.chosen.mode == "required" and not self.functions:
            others = f", not only tools of type {cut(', '.join(self.left_out))}" if self.left_out else ""
            raise ApiError(f"tool_choice needs functions in tools{others}; add them", param="tool_choice")
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                "add_generation_prompt and continue_final_message are true; give one of them",
                param="continue_final_message",
            )

    @property
    def form(self) -> StructuredOutput | None:
        """The required form of an answer without tool calls; raises RequestError."""
        given = {name: getattr(self, name) for name in _FORMS}
        return structured_output(
            self.answer_format, **given, json_whitespace=self.json_whitespace or "bounded"
        )

    def sampling_params(self, room: int, **constraints: Any) -> SamplingParams:
        """SamplingParams for at most `room` tokens, unless the request gives a maximum.

        `constraints` are further fields; a `grammar` already includes the form of the answer. Raises ApiError
        if the budget of thinking leaves no token for the answer.
        """
        most = next((one for name in _LENGTHS if (one := getattr(self, name, None)) is not None), None)
        if self.budget is not None and most is not None and self.budget >= max(most, 1):
            raise ApiError(
                f"the budget of thinking is {self.budget} tokens; allowed: less than the {most} of the whole "
                "answer; lower it, or raise the answer's maximum",
                param=self.budget_field,
            )
        guess = getattr(self, "prediction", None)  # not every endpoint has it, nor the next two
        more = {
            "max_tokens": room if most is None else most,
            "logprobs": (getattr(self, "top_logprobs", 0) or 0) if getattr(self, "logprobs", False) else None,
            "prediction": None if guess is None else guess.text or None,
            "response_format": self.answer_format,
        }
        if "grammar" in constraints:
            more |= dict.fromkeys((*_FORMS, "response_format"))
        return self.params(**more | constraints)
