"""Schemas of every draft are read in one form, and references are resolved."""

import pytest

from specinfer.errors import RequestError
from specinfer.grammar.schemas.document import SchemaDocument


def read(schema, **root):
    document = SchemaDocument({"$schema": root.pop("draft", ""), "properties": {"x": schema}, **root})
    return document.node(document.root["properties"]["x"], "")


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"minimum": 1, "exclusiveMinimum": False}, {"minimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": True}, {"exclusiveMaximum": 1}),
        ({"exclusiveMinimum": True}, {}),
        ({"items": [{}, True], "additionalItems": False}, {"prefixItems": [{}, True], "items": False}),
        ({"items": {}, "additionalItems": False}, {"items": {}}),
        (
            {"dependencies": {"a": ["b"], "c": {"minProperties": 2}}, "dependentRequired": {"d": ["a"]}},
            {
                "dependentRequired": {"d": ["a"], "a": ["b"]},
                "dependentSchemas": {"c": {"minProperties": 2}},
            },
        ),
        ({"type": "string", "required": True, "title": "T", "nullable": True}, {"type": "string"}),
        ({"minLength": 2.0, "maxItems": 10**30}, {"minLength": 2, "maxItems": 2**31 - 1}),
    ],
)
def test_older_drafts_keep_their_meaning(given, form):
    assert read(given) == form


def test_siblings_of_a_reference_count_since_draft_2019():
    beside = {"$ref": "#/$defs/a", "minLength": 2}
    assert read(beside) == beside
    assert read(beside, draft="http://json-schema.org/draft-07/schema#") == {"$ref": "#/$defs/a"}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}


@pytest.mark.parametrize(
    ("reference", "root", "target"),
    [
        ("#/$defs/a", {"$defs": {"a": TEXT}}, TEXT),
        ("#/definitions/a~1b", {"definitions": {"a/b": TEXT}}, TEXT),
        ("#/$defs/a%20b~0", {"$defs": {"a b~": TEXT}}, TEXT),
        ("#/oneOf/1", {"oneOf": [NUMBER, TEXT]}, TEXT),
        ("#/components/schemas/A", {"components": {"schemas": {"A": TEXT}}}, TEXT),
        ("#small", {"$defs": {"a": {"$anchor": "small", **TEXT}}}, {"$anchor": "small", **TEXT}),
        ("#small", {"definitions": {"a": {"id": "#small", **TEXT}}}, {"id": "#small", **TEXT}),
        ("http://x.org/s.json#/$defs/a", {"$id": "http://x.org/s.json", "$defs": {"a": TEXT}}, TEXT),
        (
            "item.json",
            {"$id": "http://x.org/s.json", "$defs": {"a": {"$id": "/item.json", **TEXT}}},
            {"$id": "/item.json", **TEXT},
        ),
        ("#/$defs/none", {}, None),
        ("#nowhere", {}, None),
        ("http://example.com/schema", {}, None),
        ("other.json#/$defs/a", {"$defs": {"a": TEXT}}, None),
    ],
)
def test_references_are_resolved(reference, root, target):
    document = SchemaDocument({"properties": {"x": {"$ref": reference}}, **root})
    node = document.node(document.root["properties"]["x"], "")
    found = document.target(node["$ref"])
    assert (found and found[0]) == target


def test_a_reference_to_the_root():
    document = SchemaDocument({"properties": {"x": {"$ref": "#"}, "y": {"$recursiveRef": "#"}}})
    for name, key in (("x", "$ref"), ("y", "$recursiveRef")):
        node = document.node(document.root["properties"][name], "")
        assert document.target(node[key]) == (document.root, "")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": []}, "/type is []; allowed: one or more of"),
        ({"minLength": -1}, "/minLength is -1; allowed: an integer >= 0"),
        ({"multipleOf": 0}, "/multipleOf is 0; allowed: a number > 0"),
        ({"anyOf": []}, "/anyOf is []; allowed: a list of one schema or more"),
        ({"properties": []}, "/properties is []; allowed: an object"),
        ({"pattern": 3}, "/pattern is 3; allowed: a string"),
        ({"required": ["a", 1]}, "/required is ['a', 1]; allowed: a list of names"),
        ({"uniqueItems": 1}, "/uniqueItems is 1; allowed: true or false"),
    ],
)
def test_a_malformed_keyword_is_named(schema, message):
    with pytest.raises(RequestError) as caught:
        SchemaDocument(schema).node(schema, "")
    assert message in str(caught.value)
