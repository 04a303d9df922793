import pytest

from specinfer.processors.schema_recursion import endless_reference


def needs(name, schema):
    return {"type": "object", "properties": {name: schema}, "required": [name]}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({}, None),
        (needs("next", {"$ref": "#"}), "#"),
        (needs("next", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}), None),
        (needs("next", {"oneOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]}), None),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, None),
        (needs("next", {"allOf": [{"type": "object"}, {"$ref": "#"}]}), "#"),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, None),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1.0}, "#"),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, None),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": needs("b", {"$ref": "#/$defs/b"}), "b": {}}}, None),
        (
            {
                "$ref": "#/$defs/a~1",
                "$defs": {"a/": needs("b", {"$ref": "#/$defs/b"}), "b": needs("a", {"$ref": "#/$defs/a~1"})},
            },
            "#/$defs/a~1",
        ),
        (needs("next", {"$ref": "#", "const": 3}), None),
        ({"$ref": "other.json"}, None),
        ({"prefixItems": [{"$ref": "#/prefixItems/0"}]}, "#/prefixItems/0"),
        ({"$ref": "#/nowhere"}, None),
    ],
)
def test_references_that_need_themselves_are_found(schema, endless):
    assert endless_reference(schema) == endless
