"""Function: a function that a request describes, and the Tools made of functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.errors import RequestError, naming, shown
from specinfer.grammar.lark import json_rule
from specinfer.grammar.library_vocabulary import fault_of, in_one_line, without_places
from specinfer.serve.dialect.tool import Tool
from specinfer.serve.fields.body import Fields
from specinfer.structured_output import schema_source

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MOST_TOOLS = 128  # as in OpenAI's API; each schema takes some milliseconds
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Fields):
    """A function, as a request describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments are held to the schema in any case


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
