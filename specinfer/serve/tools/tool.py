"""Tool and ToolChoice: what a request lets its model call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.errors import RequestError, naming
from specinfer.grammar.complaint import in_one_line, without_places
from specinfer.grammar.lark import json_rule
from specinfer.grammar.library_vocabulary import fault_of
from specinfer.structured_output import schema_source

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MOST_TOOLS = 128  # as in OpenAI's API; each schema takes some milliseconds
_MAY_NAME_OTHERS = frozenset(  # keywords beside `properties` that may speak of other names
    [
        *("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "patternProperties"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties"),
    ]
)
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, with a JSON schema of its arguments.

    Arguments follow the schema. What of it cannot be followed is passed over, or refused when `strict`.
    """

    name: str
    parameters: Mapping[str, Any]  # always of an object
    description: str | None = None
    strict: bool = False

    @property
    def takes_others(self) -> bool:
        """Whether arguments may have names beside those of `properties`: where the schema speaks of others.

        A schema without `additionalProperties` would allow any name, but a function is called with the
        parameters it declares, and vLLM, SGLang and llama.cpp write no others either.
        """
        given = self.parameters
        properties = given.get("properties") or {}
        others = given.get("additionalProperties", not properties)
        unnamed = not set(given.get("required", ())) <= set(properties)
        return others is not False or unnamed or not _MAY_NAME_OTHERS.isdisjoint(given)

    @property
    def held_parameters(self) -> Mapping[str, Any]:
        """The schema that arguments are held to, which says whether they may have other names."""
        return self.parameters if self.takes_others else {**self.parameters, "additionalProperties": False}

    def described(self) -> dict[str, Any]:
        """The tool in OpenAI's shape, as chat templates show it to models."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a model may call, must, or must call one tool."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None  # the only tool it may call

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in tools if self.name in (None, tool.name))


@naming("tools")
def read_tools(given: object) -> tuple[Tool, ...]:
    """The tools of a request, in OpenAI's shape; none for None.

    Raises RequestError, naming the place, on what has another shape, on two tools of one name, and on a
    schema that is malformed or that no arguments can meet.
    """
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(f"tools is {_short(given)}; allowed: a list of tools")
    if len(given) > _MOST_TOOLS:
        raise RequestError(f"tools has {len(given)} tools; allowed: at most {_MOST_TOOLS}; leave some out")
    tools = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(given)]
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}].function.name is {name!r}, like an earlier one's; rename it")
    return tuple(tools)


@naming("tool_choice")
def read_tool_choice(given: object, tools: Sequence[Tool]) -> ToolChoice:
    """What a request's `tool_choice` asks for; None is "auto" where there are tools.

    Raises RequestError on another shape, and when it asks for a call of what is no tool of the request.
    """
    match given:
        case None:
            return ToolChoice("auto" if tools else "none")
        case "none":
            return ToolChoice("none")
        case "auto" | "required" as mode:
            choice = ToolChoice(mode)
        case {"type": "function", "function": {"name": str(name)}}:
            choice = ToolChoice("required", name)
        case _:
            raise RequestError(f"tool_choice is {_short(given)}; allowed: {_CHOICES}")
    if not tools:
        raise RequestError(f"tool_choice is {_short(given)} without tools; give some, or leave it out")
    if not choice.among(tools):
        names = ", ".join(tool.name for tool in tools)
        raise RequestError(f"tool_choice names {choice.name!r}, which is none of the tools: {names}")
    return choice


def _tool(name: str, given: object) -> Tool:
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise RequestError(f'{name} is {_short(given)}; allowed: {{"type": "function", "function": {{...}}}}')
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{name}.function is {_short(function)}; allowed: an object with a name")
    called, description, strict = (function.get(key) for key in ("name", "description", "strict"))
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        raise RequestError(
            f"{name}.function.name is {_short(called)}; allowed: 1 to 128 letters, digits and any of _ . : -"
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{name}.function.description is {_short(description)}; allowed: a string")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{name}.function.strict is {_short(strict)}; allowed: true or false")
    where = f"{name}.function.parameters"
    with naming(where):
        parameters = _parameters(where, function.get("parameters"), strict is True)
    return Tool(called, parameters, description, strict is True)


def _parameters(where: str, given: object, strict: bool) -> Mapping[str, Any]:
    """A schema of an object that can be followed."""
    if given is None:
        return _NO_PARAMETERS
    schema_source(where, given)
    assert isinstance(given, Mapping)
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"{where} has the type {_short(kind)}; allowed: object, since arguments have names"
        )
    schema = {**given, "type": "object"}
    try:
        said = without_places(in_one_line(fault_of(f"start: {json_rule(schema, strict=strict)}")))
    except RequestError as error:
        raise RequestError(f"{where} cannot be used: {error}") from None
    if said:
        raise RequestError(f"{where} cannot be used: {said}; change or drop that part of the schema")
    return schema


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
