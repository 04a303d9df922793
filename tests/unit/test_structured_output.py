import json
import math

import pytest

from specinfer.errors import RequestError
from specinfer.structured_output import MAX_SOURCE, OutputKind, StructuredOutput, structured_output


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema} | more}


def test_each_parameter_becomes_one_form():
    for asked, kind, source in (
        ({"response_format": {"type": "json_object"}}, OutputKind.JSON_OBJECT, ""),
        ({"response_format": schema_format({}, strict=None)}, OutputKind.JSON_SCHEMA, "{}"),
        ({"response_format": schema_format({}, strict=False)}, OutputKind.JSON_SCHEMA, "{}"),
        (
            {"response_format": schema_format({"required": ["b", "a"]}, strict=True, description="d")},
            *(OutputKind.JSON_SCHEMA, '{"required":["b","a"]}'),
        ),
        ({"regex": "[0-9]+"}, OutputKind.REGEX, "[0-9]+"),
        ({"choice": ("yes", "nein \u00fc")}, OutputKind.CHOICE, '["yes", "nein \u00fc"]'),
        ({"grammar": 'root ::= "a"'}, OutputKind.GRAMMAR, 'root ::= "a"'),
    ):
        form = structured_output(**asked)
        expected = StructuredOutput(kind, source, strict="required" in source)
        assert form == expected, asked
        assert [form.parameter] == [*asked], asked
        assert hash(form) == hash(expected), asked


def test_infinity_is_what_is_read_of_a_bound_beyond_floats():
    form = structured_output(schema_format(json.loads('{"maximum": 1.8e308}')))
    assert form.source == '{"maximum":Infinity}'


def test_white_space_is_asked_for_where_there_is_json():
    forms = [structured_output(regex="a", json_whitespace=one) for one in ("bounded", "any", "none")]
    assert forms[0] == forms[1] == forms[2]
    forms = [
        structured_output({"type": "json_object"}, json_whitespace=one).whitespace for one in ("any", "none")
    ]
    assert forms == ["any", "none"]
    with pytest.raises(
        RequestError, match="json_whitespace is 'some'; allowed: bounded, any, none"
    ) as caught:
        structured_output(json_whitespace="some")
    assert caught.value.parameter == "json_whitespace"


def test_the_order_of_properties_is_kept_because_it_is_the_order_of_the_text():
    one = structured_output(schema_format({"properties": {"b": {}, "a": {}}}))
    other = structured_output(schema_format({"properties": {"a": {}, "b": {}}}))
    assert one.source == '{"properties":{"b":{},"a":{}}}'
    assert one != other


CIRCULAR = {}
CIRCULAR["again"] = CIRCULAR


WRONG = [
    ({"regex": "a", "choice": ["a"]}, "regex and choice are given together"),
    ({"response_format": "json"}, "response_format is 'json'; allowed: "),
    ({"response_format": {"type": "xml"}}, "response_format has the type 'xml'; allowed: "),
    ({"response_format": {"type": "json_object", "schema": {}}}, "has the key 'schema'; allowed: type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "name is None; allowed: a non-empty string",
    ),
    ({"response_format": schema_format([])}, r"json_schema.schema is \[\]; allowed: a JSON schema"),
    ({"response_format": schema_format({}, strict="yes")}, "strict is 'yes'; allowed: true or false"),
    ({"response_format": schema_format({}, streng=1)}, "has the key 'streng'; allowed: description, name"),
    ({"response_format": schema_format({"x-guidance": {}})}, "x-guidance"),
    ({"response_format": schema_format({"maximum": math.nan})}, "cannot be written as JSON"),
    ({"response_format": schema_format(CIRCULAR)}, "cannot be written as JSON"),
    ({"preamble": "preamble: /x*/"}, "preamble is given without a form"),
    ({"preamble": 3, "regex": "a"}, "preamble is 3; allowed: Lark rules"),
    ({"regex": ""}, "regex is ''; allowed: a regular expression"),
    ({"regex": "a\ud800"}, "regex has half of a surrogate pair at character 1"),
    ({"regex": "a\0"}, "regex holds a NUL character"),
    ({"regex": "a" * (MAX_SOURCE + 1)}, f"regex has {MAX_SOURCE + 1} characters; allowed: at most"),
    ({"choice": "yes"}, "choice is 'yes'; allowed: a list"),
    ({"choice": []}, "choice is empty; allowed: a list"),
    ({"choice": ["yes", ""]}, "choice holds ''; allowed: a list"),
    ({"choice": ["yes", 1]}, "choice holds 1; allowed: a list"),
    ({"grammar": b"a"}, "grammar is b'a'; allowed: a Lark grammar"),
]


def test_what_is_wrong_is_named():
    for asked, message in WRONG:
        with pytest.raises(RequestError, match=message) as caught:
            pytest.fail(f"{asked}: {structured_output(**asked)}")
        assert len(str(caught.value)) < 300, message
