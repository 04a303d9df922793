"""Tools and tool choices of requests."""

import json
import re
from typing import Any

import pytest

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import Tool, ToolChoice
from tests.unit.serve.dialect.families import TOOLS, WEATHER, tools_of


def function(**parts):
    return {"name": "f"} | parts


def test_tools_are_read():
    assert tools_of() == ()
    assert (
        Tool("get", WEATHER, "Weather."),
        Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
    ) == TOOLS
    assert tools_of(function(strict=True, parameters=WEATHER)) == (Tool("f", WEATHER, strict=True),)


def test_arguments_are_always_an_object():
    cases = [
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, None),
    ]
    for schema, read in cases:
        [tool] = tools_of(function(parameters=schema))
        assert tool.parameters == (read or schema | {"type": "object"}), schema


def test_invalid_tools_are_refused():
    cases = [
        ([function(name="")], ".name is ''; allowed: 1 to 128 letters"),
        ([function(name='a"b')], ".name is 'a\"b'; allowed"),
        ([function(), function()], "tools[1].function.name is 'f', like an earlier one's; rename it"),
        ([function()] * 129, "tools has 129 tools; allowed: at most 128"),
    ]
    deep = json.loads('{"properties":{"a":' * 150 + "{}" + "}}" * 150)
    poem = {"properties": {"a": {"format": "poem", "type": "string"}}}
    for schema, strict, message in (
        ({"x-guidance": {}}, False, ' has the key "x-guidance"'),
        ({"const": {1}}, False, " cannot be written as JSON"),
        ({"type": "string"}, False, " has the type 'string'; allowed: object"),
        (
            {"properties": {"a": {"type": "text"}}, "required": ["a"]},
            False,
            " cannot be used: Invalid type: text; change or drop that part of the schema",
        ),
        (
            {"properties": {"a": False}, "required": ["a"]},
            False,
            " cannot be used: Unsatisfiable schema: required property 'a' is unsatisfiable",
        ),
        (poem, True, "Unknown format: poem; change or drop that part of the schema, or leave out strict"),
        (deep, True, ' cannot be used: failed to parse "%json": recursion limit exceeded'),
    ):
        cases.append(([function(parameters=schema, strict=strict)], message))
    for given, message in cases:
        with pytest.raises(RequestError, match=re.escape(message)) as caught:
            pytest.fail(f"{given!r}: {tools_of(*given)}")
        named = "tools[0].function.parameters" if "parameters" in given[0] else "tools"
        assert caught.value.parameter == named, message
        assert "\n" not in str(caught.value), message


def test_a_choice_is_among_the_tools():
    assert ToolChoice("none").among(TOOLS) == ()
    assert ToolChoice("auto").among(TOOLS) == ToolChoice("required").among(TOOLS) == TOOLS
    assert ToolChoice("required", "get_time").among(TOOLS) == TOOLS[1:]
    with pytest.raises(RequestError, match="tool_choice is 'put'; allowed: a name in tools: get, ") as caught:
        ToolChoice("required", "put").among(TOOLS)
    assert caught.value.parameter == "tool_choice"


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_a_function_is_called_with_the_parameters_that_it_declares() -> None:
    """Small models invent further names, and functions called with these fail."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"required": ["city"]}, True),
        ({"additionalProperties": False}, False),  # it is closed itself
        ({"additionalProperties": True}, False),
        ({"additionalProperties": {"type": "integer"}}, False),
        ({"patternProperties": {"^x": {}}}, False),
        ({"anyOf": [{"required": ["country"]}]}, False),
        ({"required": ["country"]}, False),  # which has no other schema, and must be there
        ({"properties": {}}, False),
    ]
    for more, closed in cases:
        given = CITY | more
        [tool] = tools_of({"name": "f", "parameters": given})
        assert tool.constrained_parameters == (
            given | {"additionalProperties": False} if closed else given
        ), more
        assert tool.described()["function"]["parameters"] == given, more
