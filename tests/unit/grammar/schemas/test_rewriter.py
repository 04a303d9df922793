"""Parts of schemas that are dropped, and the rewritten rest."""

import json
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from specinfer.errors import RequestError
from specinfer.grammar.schemas.rewriter import enforced_schema
from tests.unit.grammar.vocabulary import accepts, byte_id, grammar_of, schema_format

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node", "minProperties": 1}, "n": {}}}
CONDITIONS = [
    {
        "if": {"properties": {f"a{index}": {"const": 1}}, "required": [f"a{index}"]},
        "then": {"required": [f"b{index}"]},
    }
    for index in range(12)
]


def left_out(schema):
    return enforced_schema(json.dumps(schema), False).left_out


@dataclass(frozen=True)
class Part:
    """A schema, what is left out of it, and texts."""

    schema: Any
    lacks: list[str]
    good: list[str]
    bad: list[str]


LOOP = {"type": "array", "items": {"type": "array", "$ref": "#/$defs/loop"}}
JOINED = [
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    {"patternProperties": {"b$": {"type": "integer"}}},
]
BEHIND = {"(?<=a)b": {"type": "null"}}
PARTS = {
    "beside a reference to what it stands in": Part(
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        ["minProperties at /$defs/node/properties/next"],
        ['{"next":{}}'],
        ['{"next":1}'],
    ),
    "a type beside it says nothing more": Part(
        {"$ref": "#/$defs/loop", "$defs": {"loop": LOOP}}, [], ["[[],[[]]]"], ["[1]", "1"]
    ),
    "only once parts are joined": Part(
        {"allOf": JOINED},
        ["allOf at /allOf/1"],
        ['{"ab":1}', '{"c":null}'],
        ['{"a":"x"}', "[]"],
    ),
    "a definition that nothing meets": Part(
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/no"}},
            "$defs": {"no": {"type": "string", "minLength": 2, "maxLength": 1}},
        },
        [],
        ['{"b":1}'],
        ['{"a":"x"}', '{"a":1}'],
    ),
    "each condition is three alternatives": Part(
        {"type": "object", "allOf": CONDITIONS},
        [f"allOf at /allOf/{index}" for index in range(5, 12)],
        ['{"a1":2}', '{"a1":1,"b1":0}', '{"a9":1}'],
        ['{"a1":1}'],
    ),
    "bounds beyond 64 bits": Part(
        {"type": "integer", "maximum": 2**64}, ["maximum at the schema"], ["3", str(2**70)], ["1.5"]
    ),
    "integers that are no floats": Part({"const": 2**53 + 1}, ["const at the schema"], [str(2**53 + 1)], []),
    "more than one item": Part(
        {"type": "array", "contains": {"const": 1}, "minContains": 2},
        ["contains at the schema"],
        ["[1,1]"],
        ["[1]"],
    ),
    "a record of a few names": Part(  # Zod's
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
            "required": ["a", "b"],
        },
        [],
        ['{"a":1,"b":2}'],
        ['{"a":1}', '{"a":1,"b":2,"c":3}', '{"a":"x","b":2}'],
    ),
    "described names alone": Part(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": {"enum": ["a", "b"]}},
        [],
        ['{"a":1}', '{"b":"x"}', "{}"],
        ['{"c":1}', '{"a":"x"}'],
    ),
    "an expression that may match described names alone": Part(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "propertyNames": {"pattern": "^[ab]$"},
        },
        ["propertyNames at the schema"],
        ['{"a":1}', '{"a":1,"b":2}'],
        ['{"a":"x"}'],
    ),
    "names behind others": Part(
        {"type": "object", "additionalProperties": {"type": "integer"}, "patternProperties": BEHIND},
        ["patternProperties at /patternProperties/(?<=a)b"],
        ['{"ab":null,"c":1}'],
        ['{"c":"x"}'],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_unsupported_parts_are_dropped_and_the_rest_is_enforced(name):
    part = PARTS[name]
    assert list(left_out(part.schema)) == part.lacks
    grammar = grammar_of(response_format=schema_format(part.schema))
    texts = [*part.good, *part.bad]
    assert {text: accepts(grammar, text) for text in texts} == {text: text in part.good for text in texts}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "maximum": 1.7e308}, ["0", "-2.5", "123456789012"], [str(2**64)]),
        ({"type": "integer", "minimum": -(2**63)}, ["0", str(-(2**62))], [str(-(2**65))]),
        ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53)], [str(2**53 + 2)]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, ["1.1", "1.5"], ["1", "1.0"]),
        ({"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1.2"], ["-1", "-1.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.001", "0.5"], ["0", "0.0"]),
        ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}, ["0.5", "0.9"], ["1", "1.0"]),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}},
            ['{"a":null}', '{"b":1}'],
            ['{"\\u0061":1}'],
        ),
    ],
)
def test_a_strict_schema_may_exclude_more_and_never_less(schema, good, bad):
    grammar = grammar_of(response_format=schema_format(schema, strict=True))
    assert {text: accepts(grammar, text) for text in [*good, *bad]} == {
        text: text in good for text in [*good, *bad]
    }


def test_partial_enforcement_of_a_schema_is_logged_once(caplog):
    caplog.set_level(logging.WARNING)
    many = {"properties": {f"p{index:02}": {"type": "string", "format": "poem"} for index in range(20)}}
    for _ in range(3):
        left_out(many)
    [line] = caplog.messages
    assert line.startswith(
        "a schema is enforced without format at /properties/p00, format at /properties/p01"
    )
    assert line.endswith("and 12 more")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {}, "b": {}}},
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "properties": {"a": {}, "b": {}}},
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "patternProperties": {"^[ab]$": {"type": "integer"}},
            "additionalProperties": False,
        },
    ],
)
def test_no_comma_follows_the_last_possible_name(schema):
    """Nothing could follow it, and the answer would break off."""
    state = grammar_of(response_format=schema_format(schema)).state()
    for byte in b'{"a":1,"b":2':
        assert state.permits((), byte_id(byte))
        state.commit([byte_id(byte)])
    if state.permits((), byte_id(ord(","))):
        state.commit([byte_id(ord(","))])
        assert any(state.permits((), byte_id(byte)) for byte in b' "')


def test_an_expensive_schema_is_refused_quickly():
    nested = "^" + "(?=a)" * 5000 + "a"
    assert [*left_out({"type": "string", "pattern": nested})] == ["pattern at the schema"]
    chain = {f"d{i}": {"minProperties": 1, "$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    with pytest.raises(RequestError, match="make it smaller"):
        left_out({"$ref": "#/$defs/d0", "$defs": chain | {"d3000": {"type": "object"}}})
    fan = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 100} for i in range(8)} | {"a8": {"const": 1}}
    with pytest.raises(RequestError, match="too many nested alternatives"):
        left_out({"not": {"$ref": "#/$defs/a0"}, "$defs": fan})
