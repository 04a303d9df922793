"""Answers that call grammars accept, token by token, with tokenizers of each family."""

import pytest

from specinfer.serve.dialect.call_format import ToolChoice
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.reasoning import Reasoning
from specinfer.structured_output import structured_output
from tests.schemas import closed
from tests.unit.serve.dialect.families import FAMILIES, TOOLS, as_hermes, tools_of, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of

AUTO, REQUIRED, NAMED = ToolChoice("auto"), ToolChoice("required"), ToolChoice("required", "get_time")
CITY = ("get", {"city": "Oslo", "days": 2})


def schema_form(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


FORMS = {
    '{"a": [1, {"name": "get"}]}': {"response_format": {"type": "json_object"}},
    '{"name": "Ann", "n": 3}': schema_form(closed({"name": {"type": "string"}, "n": {"type": "integer"}})),
    '["a", "b"]': schema_form({"type": "array", "items": {"type": "string"}}),
    "AB-1": {"regex": "[A-Z]{2}-[0-9]"},
    "no way": {"choice": ["yes", "no way"]},
    "((()))": {"grammar": 'root ::= "(" root? ")"'},
    "1,22": {"grammar": 'start: item ("," item)*\nitem: /[0-9]+/'},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_beside_a_form_an_answer_is_calls_or_the_form_and_nothing_else(name):
    family = FAMILIES[name]
    call, bad = family.written(CITY), family.written(("get", {"city": "Oslo", "days": 0}))
    calls = [call, family.written(("get_time", {}))]
    calls += [] if family.format.single else [family.written(CITY, ("get_time", {}))]
    for text, fields in FORMS.items():
        form = structured_output(**fields)
        grammar = call_grammar(family.format, TOOLS, AUTO, form=form)
        good = [text, *calls]
        assert {answer: verdict(family, grammar, answer) for answer in good} == dict.fromkeys(good)
        spoilt = (text[:-1] + "~", text + "~", text + call, call + text)
        for other in ("", "hello", f"So:\n{call}", *spoilt, bad):
            assert verdict(family, grammar, other) is not None, other
        for choice in (REQUIRED, NAMED):  # then the form says nothing
            without = call_grammar(family.format, TOOLS, choice)
            assert call_grammar(family.format, TOOLS, choice, form=form) == without
        for answer, count in ((text, 0), (call, 1)):
            content, found = content_and_calls(events_of(family.format, TOOLS, answer))
            assert (content, len(found)) == ("" if count else answer, count)


def test_white_space_in_arguments_follows_the_option():
    family = FAMILIES["hermes"]
    texts = ['{"city":"Oslo"}', '{\n  "city": "Oslo" }', '{   "city":"Oslo"}']
    calls = [as_hermes("get", 0).replace("0}", f"{text}}}") for text in texts]
    for whitespace, taken in {"bounded": calls[:2], "any": calls, "none": calls[:1]}.items():
        grammar = call_grammar(family.format, TOOLS, REQUIRED, whitespace=whitespace)
        assert [call for call in calls if verdict(family, grammar, call) is None] == taken, whitespace


def test_an_answer_that_only_begins_like_a_call_of_llamas_stays_text():
    family = FAMILIES["llama3"]
    grammar = call_grammar(family.format, TOOLS, AUTO)
    for text in ('{"name": "Ann", "age": 3}', '{"name": "get"}', '{"name": "get", "size": 1}', '{"a": "get"'):
        assert verdict(family, grammar, text) is None
    # and one that is a call is held, however it is spaced
    for begin in ('{"name":"get","parameters":', '\n{"type": "function", "name": "get", "parameters": '):
        assert verdict(family, grammar, begin + '{"city": 3') == begin + '{"city": '
    assert verdict(family, grammar, '<|python_tag|>{"name": "get", "parameters": {"city": "x"}}') is None
    assert verdict(family, grammar, "<|python_tag|>print(1)") == "<|python_tag|>"


@pytest.mark.parametrize("name", ["hermes", "hermes, text", "hermes, special"])
def test_reasoning_may_hold_anything_and_comes_before_calls(name):
    family = FAMILIES[name]
    special = {mark: family.tokenizer.special_id(mark) for mark in ("<think>", "</think>")}
    reasoning = Reasoning({mark: token for mark, token in special.items() if token is not None})
    call = family.written(CITY)
    think = "<think>\nI could write <tool_call> now.\n</think>\n\n"
    if name == "hermes, special":
        think = think.replace("<tool_call>", "one")  # which cannot be written as text there

    def legal(text, choice=AUTO, inside=False):
        grammar = call_grammar(family.format, TOOLS, choice, reasoning=reasoning, starts_inside=inside)
        return verdict(family, grammar, text)

    inside = think.removeprefix("<think>")
    for text in (think + call, think + "hello", think + f"So:\n{call}", think[:20], "hello", call):
        assert legal(text) is None, text
    assert legal(think + "x <tool_call>y") == think + "x <tool_call>"
    for text in (inside + call, inside + "hello", inside[:20], "all of it is reasoning"):
        assert legal(text, inside=True) is None, text
    for text in (think + call, call):
        assert legal(text, REQUIRED) is None, text
    assert legal(inside + call, REQUIRED, inside=True) is None
    assert legal(think + "hello", REQUIRED) == think
    assert legal(inside + "hello", REQUIRED, inside=True) == inside
    legal_part = "" if "<tool_call>" in family.format.special else call + "..."
    assert legal(call, REQUIRED, inside=True) == legal_part


def test_unsupported_keywords_are_ignored_unless_strict():
    odd = {"type": "object", "properties": {"at": {"type": "string", "format": "poem"}, "n": {"oneOf": [{}]}}}
    tools = tools_of({"name": "f", "parameters": odd})
    family = FAMILIES["hermes"]
    grammar = call_grammar(family.format, tools, REQUIRED)
    assert verdict(family, grammar, as_hermes("f", {"at": "x"})) is None
    bad = as_hermes("f", {"at": 1})
    assert verdict(family, grammar, bad) == bad.partition("1")[0]
