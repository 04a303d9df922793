"""Tool and ToolChoice: what a request lets its model call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.errors import RequestError, naming, shown
from specinfer.grammar.lark import json_rule
from specinfer.grammar.library_vocabulary import fault_of, in_one_line, without_places
from specinfer.serve.fields import Fields
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


class Function(Fields):
    """A function, as a request describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments are held to the schema in any case


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
        """The tools that may be called; raises RequestError where the only one is not there."""
        if self.mode == "none":
            return ()
        found = tuple(tool for tool in tools if self.name in (None, tool.name))
        if self.name is not None and not found:
            names = ", ".join(tool.name for tool in tools)
            raise RequestError(
                f"tool_choice names {self.name!r}, which is none of the tools: {names}", "tool_choice"
            )
        return found


@naming("tools")
def read_tools(functions: Sequence[Function]) -> tuple[Tool, ...]:
    """The tools that these functions are.

    Raises RequestError, naming the place, on two of one name, and on a schema that is malformed or that no
    arguments can meet.
    """
    if len(functions) > _MOST_TOOLS:
        raise RequestError(
            f"tools has {len(functions)} tools; allowed: at most {_MOST_TOOLS}; leave some out"
        )
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
    """A schema of an object that can be followed."""
    if given is None:
        return _NO_PARAMETERS
    schema_source(where, given)
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"{where} has the type {shown(kind, 80)}; allowed: object, since arguments have names"
        )
    schema = {**given, "type": "object"}
    try:
        said = without_places(in_one_line(fault_of(f"start: {json_rule(schema, strict=strict)}")))
    except RequestError as error:
        raise RequestError(f"{where} cannot be used: {error}") from None
    if said:
        raise RequestError(f"{where} cannot be used: {said}; change or drop that part of the schema")
    return schema
