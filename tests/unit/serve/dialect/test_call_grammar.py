"""Answers that call grammars accept, token by token, with tokenizers of each family."""

import pytest

from specinfer.serve.dialect.call_format import ToolChoice
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.reasoning import Reasoning
from specinfer.structured_output import structured_output
from tests.unit.serve.dialect.families import FAMILIES, TOOLS, tools_of, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of

AUTO, REQUIRED, NAMED = ToolChoice("auto"), ToolChoice("required"), ToolChoice("required", "get_time")
CITY = '{"city": "Oslo", "days": 2}'


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama3(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(*calls):
    return f"[TOOL_CALLS] [{', '.join(calls)}]"


def mistral_item(name, arguments):
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def mistral_args(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def mistral_ids(name, arguments):
    return f"[TOOL_CALLS]{name}[CALL_ID]abcDEF012[ARGS]{arguments}"


# family -> one call, two calls, and whether text may stand before them
WRITTEN = {
    "qwen": (hermes, lambda *both: "\n".join(hermes(*call) for call in both), True),
    "llama3, several": (llama3, lambda *both: "; ".join(llama3(*call) for call in both), False),
    "mistral": (
        lambda *call: mistral(mistral_item(*call)),
        lambda *both: mistral(*(mistral_item(*call) for call in both)),
        True,
    ),
    "mistral_args": (mistral_args, lambda *both: "".join(mistral_args(*call) for call in both), True),
    "mistral_ids": (mistral_ids, lambda *both: "".join(mistral_ids(*call) for call in both), True),
}
WRITTEN |= {
    "hermes": WRITTEN["qwen"],
    "hermes, described": WRITTEN["qwen"],
    "hermes, special": WRITTEN["qwen"],
    "mistral, spelled": WRITTEN["mistral"],
    "llama3": WRITTEN["llama3, several"],
}
PLAIN = [
    "",
    "hello",
    'a {"name": "get"} [',
    "<tool",
    "[TOOL",
    '{"answer": [1, {"name": "get"}]}',
    "\u00d6\n\n",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_free_answer_is_text_or_calls(name):
    family = FAMILIES[name]
    one, both, takes_text = WRITTEN[name]
    grammar = call_grammar(family.format, TOOLS, AUTO)
    calls = [one("get", CITY), one("get_time", "{}"), one("get", '{\n  "city": "\\""\n}')]
    if not family.format.single:
        calls.append(both(("get", CITY), ("get_time", "{}")))
    calls += [f"So:\n{calls[0]}"] if takes_text else []
    assert {text: verdict(family, grammar, text) for text in [*PLAIN, *calls]} == dict.fromkeys(
        [*PLAIN, *calls]
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=["auto", "required"])
def test_the_arguments_of_calls_follow_the_schema(name, choice):
    family = FAMILIES[name]
    one, *_ = WRITTEN[name]
    grammar = call_grammar(family.format, TOOLS, choice)
    for called, good, bad in [
        ("get", "", "[1]"),
        ("get", "{", "}"),
        ("get", '{"c', 'x": 1}'),
        ("get", '{"city": ', "3}"),
        ("get", '{"city": "Oslo", "days": ', "0}"),
        ("get_time", "{", '"a": 1}'),
    ]:
        text = one(called, good + bad)
        cut = verdict(family, grammar, text)
        assert cut == text[: text.index(good + bad) + len(good)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_must_be_is_there_at_once_and_whole(name):
    family = FAMILIES[name]
    one, both, _ = WRITTEN[name]
    grammar = call_grammar(family.format, TOOLS, REQUIRED)
    assert verdict(family, grammar, one("get", CITY)) is None
    assert verdict(family, grammar, both(("get", CITY), ("get_time", "{}"))) == (
        one("get", CITY).removesuffix("]") if family.format.single else None
    )
    assert verdict(family, grammar, "") == "..."
    assert verdict(family, grammar, "hello") == ""
    cut = one("get", CITY).partition("days")[0]
    assert verdict(family, grammar, cut) == cut + "..."


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=["auto", "required"])
def test_without_parallel_calls_there_is_one_call(name, choice):
    family = FAMILIES[name]
    one, both, _ = WRITTEN[name]
    grammar = call_grammar(family.format, TOOLS, choice, parallel=False)
    assert verdict(family, grammar, one("get", CITY)) is None
    assert verdict(family, grammar, both(("get", CITY), ("get_time", "{}"))) is not None


OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS = {
    '{"a": [1, {"name": "get"}]}': {"response_format": {"type": "json_object"}},
    '{"name": "Ann", "n": 3}': {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}
    },
    '["a", "b"]': {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "string"}}},
        }
    },
    "AB-1": {"regex": "[A-Z]{2}-[0-9]"},
    "no way": {"choice": ["yes", "no way"]},
    "((()))": {"grammar": 'root ::= "(" root? ")"'},
    "1,22": {"grammar": 'start: item ("," item)*\nitem: /[0-9]+/'},
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", FORMS)
def test_beside_a_form_an_answer_is_calls_or_the_form_and_nothing_else(name, text):
    family, form = FAMILIES[name], structured_output(**FORMS[text])
    one, both, _ = WRITTEN[name]
    grammar = call_grammar(family.format, TOOLS, AUTO, form=form)
    call, bad = one("get", CITY), one("get", '{"city": 3, "days": 2}')
    good = [text, call, one("get_time", "{}")]
    good += [] if family.format.single else [both(("get", CITY), ("get_time", "{}"))]
    assert {answer: verdict(family, grammar, answer) for answer in good} == dict.fromkeys(good)
    for other in ("", "hello", f"So:\n{call}", text[:-1] + "~", text + "~", text + call, call + text, bad):
        assert verdict(family, grammar, other) is not None, other
    for choice in (REQUIRED, NAMED):  # then the form says nothing
        without = call_grammar(family.format, TOOLS, choice)
        assert call_grammar(family.format, TOOLS, choice, form=form) == without
    for answer, count in ((text, 0), (call, 1)):
        content, calls = content_and_calls(events_of(family.format, TOOLS, answer))
        assert (content, len(calls)) == ("" if count else answer, count)


def test_white_space_in_arguments_follows_the_option():
    family = FAMILIES["hermes"]
    found = {}
    for whitespace in ("bounded", "any", "none"):
        grammar = call_grammar(family.format, TOOLS, REQUIRED, whitespace=whitespace)
        texts = ['{"city":"Oslo"}', '{\n  "city": "Oslo" }', '{   "city":"Oslo"}']
        found[whitespace] = [verdict(family, grammar, hermes("get", text)) is None for text in texts]
    assert found == {
        "bounded": [True, True, False],
        "any": [True, True, True],
        "none": [True, False, False],
    }


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


@pytest.mark.parametrize("name", ["qwen", "hermes", "hermes, special"])
def test_reasoning_may_hold_anything_and_comes_before_calls(name):
    family = FAMILIES[name]
    reasoning = Reasoning.of(family.tokenizer) or Reasoning(
        {mark: i for mark in ("<think>", "</think>") if (i := family.tokenizer.special_id(mark)) is not None}
    )
    call = hermes("get", CITY)
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
    assert legal(call, REQUIRED, inside=True) == (
        "" if "<tool_call>" in family.format.special else call + "..."
    )


def test_unsupported_keywords_are_ignored_unless_strict():
    odd = {"type": "object", "properties": {"at": {"type": "string", "format": "poem"}, "n": {"oneOf": [{}]}}}
    tools = tools_of({"name": "f", "parameters": odd})
    family = FAMILIES["hermes"]
    grammar = call_grammar(family.format, tools, REQUIRED)
    assert verdict(family, grammar, hermes("f", '{"at": "x"}')) is None
    assert (
        verdict(family, grammar, hermes("f", '{"at": 1}')) == hermes("f", "\0").partition("\0")[0] + '{"at": '
    )
