"""Arguments in Python's notation: definitions that refer to themselves, levels, and escapes."""

import json

import pytest

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import ToolChoice
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.structured_output import MAX_SOURCE
from tests.unit.serve.dialect.families import Family, tools_of, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of

MARKS = BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
FAMILY = Family("{{ tools }}" + BEGIN, MARKS)
TEXT = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def call(arguments):
    return f"{BEGIN}[f({arguments})]{END}"


def grammar_of(schema, *, strict=False):
    tools = tools_of({"name": "f", "parameters": schema, "strict": strict})
    return call_grammar(FAMILY.format, tools, ToolChoice("required"))


def recursive(count):
    """An object of `count` objects like itself."""
    node = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/n"} for i in range(count)}}
    return {**node, "$defs": {"n": node}}


def nested(levels):
    """Objects in each other, the innermost with a number."""
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "additionalProperties": False}
    return schema


def test_a_grammar_grows_with_its_schema_and_not_with_the_uses_of_a_definition():
    small, large = grammar_of(recursive(8)), grammar_of(recursive(100))
    assert len(large) < 14 * len(small)
    for grammar in (small, large):
        assert verdict(FAMILY, grammar, call('p1={"p2": {"p7": {}}}, p3={}')) is None
        assert verdict(FAMILY, grammar, call('p1={"p2": 1}')) == call('p1={"p2": 1}').partition("1}")[0]


def test_a_schema_that_makes_too_long_a_grammar_is_refused():
    with pytest.raises(RequestError, match=f"allowed: at most {MAX_SOURCE}; give fewer tools"):
        grammar_of(recursive(3000))


def test_each_object_is_one_level():
    grammar = grammar_of(nested(6), strict=True)
    good = 'a={"a": {"a": {"a": {"a": {"a": 1}}}}}'
    assert verdict(FAMILY, grammar, call(good)) is None
    assert verdict(FAMILY, grammar, call(good.replace("1", "None"))) is not None
    with pytest.raises(RequestError, match="its schema may have 6 levels"):
        grammar_of(nested(7), strict=True)


def test_escapes_are_read_however_they_are_cut():
    tools = tools_of({"name": "f", "parameters": TEXT})
    grammar = grammar_of(TEXT)
    for written, value, is_legal in [
        (r"\ud83d\ude00", "\U0001f600", True),
        (r"a\ud83d.", "a\ud83d.", True),  # half of a pair stays an escape, as JSON has it
        (r"\xd6\u00d6", "\u00d6\u00d6", True),
        (r"C:\users\x", r"C:\users\x", False),
        (r"\x4", r"\x4", False),
        (r"\u12\n", "\\u12\n", False),
        (r"\u\x41", r"\uA", False),
    ]:
        text = call(f"path='{written}'")
        assert (verdict(FAMILY, grammar, text) is None) == is_legal, written
        for cut in range(len(text)):
            events = events_of(FAMILY.format, tools, text[:cut], text[cut:])
            [(_, arguments)] = content_and_calls(events)[1]
            assert arguments.encode(), "has no half of a pair"
            assert json.loads(arguments) == {"path": value}, text[:cut]
