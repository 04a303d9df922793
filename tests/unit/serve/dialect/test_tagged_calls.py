"""Calls whose arguments are between tags (Qwen3-Coder)."""

import json
from itertools import product

import pytest

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import Tool, ToolChoice
from specinfer.serve.dialect.call_grammar import call_grammar
from tests.schemas import closed
from tests.unit.serve.dialect.families import FAMILIES, TAGGED_TOOLS, tagged, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of

CODER = FAMILIES["qwen3_coder"]
AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
NOW = tagged("now")
PUT = tagged("put", text="a\n\n</par <b>", size="S", n="2")
TAGS = '["x", "y"]'


def test_values_have_the_types_of_their_schemas():
    cases = [
        ("text", "a", "a"),
        ("text", "", ""),
        ("text", ' "12"\n', ' "12"\n'),
        ("text", '\\n\t"\u00d6', '\\n\t"\u00d6'),
        ("text", "\n<parameter=n>\n</parameter", "\n<parameter=n>\n</parameter"),
        ("size", "XL", "XL"),
        ("n", " 12 ", 12),
        ("n", "twelve", "twelve"),  # which the grammar does not allow
        ("n", "NaN", "NaN"),
        ("on", "True", True),
        ("on", "false", False),
        ("tags", TAGS, ["x", "y"]),
        ("tags", "[" * 100_000, "[" * 100_000),
        ("near", "null", None),
        ("near", "12", "12"),
        ("near", "here", "here"),
        ("unknown", '{"a": 1}', {"a": 1}),
        ("unknown", "a", "a"),
    ]
    for name, text, value in cases:
        events = events_of(CODER.format, TAGGED_TOOLS, tagged("put", **{name: text}))
        [(_, arguments)] = content_and_calls(events)[1]
        assert repr(json.loads(arguments)) == repr({name: value}), (name, text)


def test_calls_are_held_to_the_form_and_to_their_schemas():
    good = [
        NOW,
        PUT,
        f"{NOW}\n{PUT}",
        tagged("put", text="", size="XL", n="12", on="true", tags=TAGS, near="null"),
        tagged("put", text="a", size="\u00d6<\n"),
        tagged("any", a="1", b="x\ny"),
    ]
    bad = [
        ("<tool_call>\n<function=", "other>"),
        ("<tool_call>\n<function=now>\n<", "parameter=a>"),
        ("<tool_call>\n<function=put>\n<parameter=", "size>"),
        ("<tool_call>\n<function=put>\n<parameter=text>\na\n</parameter>\n<parameter=size>\n", "M"),
        (PUT.partition("2\n")[0], "0"),
    ]
    for family, choice in product((CODER, FAMILIES["qwen3_coder, special"]), (AUTO, REQUIRED)):
        grammar = call_grammar(family.format, TAGGED_TOOLS, choice)
        assert {text: verdict(family, grammar, text) for text in good} == dict.fromkeys(good)
        for legal, rest in bad:
            assert verdict(family, grammar, legal + rest) == legal


def test_string_schemas_of_strict_functions_are_enforced_or_refused():
    cases = [
        ({"type": "string"}, True),
        ({"type": ["string", "null"], "description": "d"}, True),
        ({"enum": ["a", "b"]}, True),
        ({"type": "integer", "minimum": 3}, True),
        ({"type": "string", "pattern": "a+"}, False),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, False),
    ]
    for schema, held in cases:
        strict, lenient = (Tool("f", closed({"a": schema}), strict=strict) for strict in (True, False))
        assert call_grammar(CODER.format, [lenient], AUTO), schema
        if held:
            assert call_grammar(CODER.format, [strict], AUTO), schema
        else:
            with pytest.raises(RequestError, match="the function f is strict") as caught:
                pytest.fail(f"{schema!r}: {call_grammar(CODER.format, [strict], AUTO)}")
            assert caught.value.parameter == "tools", schema
