"""Function: a function described by a request, and its conversion to a Tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.errors import RequestError, naming, shown
from specinfer.grammar.lark import json_rule
from specinfer.grammar.library_vocabulary import fault_of, in_one_line, without_positions
from specinfer.serve.dialect.tool import Tool
from specinfer.serve.fields.body import Fields
from specinfer.structured_output import schema_source

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MAX_TOOLS = 128  # as in OpenAI's API; compiling a schema takes some milliseconds
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Fields):
    """A function as described by a request."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments always follow the schema


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
        fault = without_positions(in_one_line(fault_of(f"start: {json_rule(schema, strict=strict)}")))
    except RequestError as error:
        raise RequestError(f"{where} cannot be used: {error}") from None
    if fault:
        hint = "change or drop that part of the schema" + (", or leave out strict" if strict else "")
        raise RequestError(f"{where} cannot be used: {fault}; {hint}")
    return schema
