"""Formats of published models: their templates are recognised, and their calls are held and read."""

import json
import re

import pytest

from specinfer.errors import RequestError
from specinfer.request import Delta, FinishReason
from specinfer.serve.dialect.call_format import CallFormat, ToolChoice, for_template
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.dialect import call_parser
from specinfer.structured_output import structured_output
from tests.schemas import closed
from tests.unit.serve.dialect import families
from tests.unit.serve.dialect.families import FAMILIES, as_json, tokenizer, tools_of, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls, said

AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer", "minimum": 1},
    "near": {"type": "boolean"},
    "size": {"enum": ["S", "L"]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": closed({"lat": {"type": "number"}, "note": {"type": "string"}}, "lat"),
}
SCHEMA = closed(PROPERTIES, "city")
# As the clients of tests/clients send it.
ZOO = closed({"city": {"enum": ["Lisbon", "Oslo"], "type": "string"}, "unit": {"enum": ["C", "F"]}})
TOOLS = tools_of(
    {"name": "get", "parameters": SCHEMA, "strict": True, "description": "Weather."},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "weather", "parameters": ZOO, "strict": True},
)
GET = ("get", {"city": "Oslo", "days": 2})
WHOLE = {"city": "New \u00d6slo", "days": 12, "near": True, "size": "L", "tags": ["a, b", "}"]}
FULL = ("get", WHOLE | {"where": {"lat": -1.5, "note": "x)"}})
BOTH = (GET, ("now", {}))
CALLED = [(GET,), (FULL,), (("now", {}),), (("weather", {"city": "Lisbon", "unit": "C"}),), BOTH]
# Those whose calls are JSON objects without a mark are left out where any JSON object is a call.
MARKED = {name: family for name, family in FAMILIES.items() if not name.startswith("llama3")}
TEXTS = [
    *("", "hello", "<tool", "[TOOL", "\u00d6\n\n", 'a {"name": "get"} [', "```json\n[1]\n```"),
    *('{"answer": [1, {"name": "get"}]}', "import functools"),
]


def read(family, *pieces, tools=TOOLS):
    """Reasoning, content, and the calls with arguments as values, of an answer in pieces."""
    thoughts, content, calls = said(family.dialect, tools, *pieces)
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in calls]


def test_a_template_is_recognised_and_writes_what_is_read():
    for name, family in FAMILIES.items():
        assert (family.format.name, family.format.native) == (name.partition(",")[0], family.native)
        assert family.format.single == (name == "llama3"), name
        for calls in CALLED if name in MARKED else CALLED[:-1]:
            functions = [{"name": called, "arguments": json.dumps(given)} for called, given in calls]
            sent = [{"id": "abcdefghi", "type": "function", "function": one} for one in functions]
            answer = {"role": "assistant", "content": None, "tool_calls": sent}
            prompt = family.prompt([{"role": "user", "content": "?"}, answer], TOOLS)
            shown, _, written = prompt.rpartition("?")
            assert '"weather"' in shown, name
            assert shown.count("Weather.") == 1, name
            assert '"unit":{"enum":["C","F"]}' in "".join(shown.split()), name
            written = re.sub(r"\[assistant\]|<\|start_header_id\|>assistant", "", written)
            assert read(family, written) == ("", "", list(calls)), (name, written)


def test_answers_are_held_to_the_form_and_read_however_they_are_cut():
    for name, family in FAMILIES.items():
        free, forced = (call_grammar(family.format, TOOLS, choice) for choice in (AUTO, REQUIRED))
        for calls in CALLED if not family.format.single else CALLED[:-1]:
            text = family.written(*calls)
            assert verdict(family, forced, text) is None, (name, text)
            texts = [("", text)] + ([("So:", f"So:\n{text}")] if family.takes_text else [])
            for content, answer in texts:
                assert verdict(family, free, answer) is None, (name, answer)
                assert read(family, *answer) == ("", content, list(calls)), (name, answer)
                for cut in range(len(answer)) if calls in ((FULL,), BOTH) else ():
                    pieces = answer[:cut], answer[cut:]
                    assert read(family, *pieces) == ("", content, list(calls)), (name, pieces)
        for text in TEXTS:
            assert verdict(family, free, text) is None, (name, text)
            assert read(family, *text) == ("", text, []), (name, text)


def test_a_call_that_must_be_is_there_at_once_and_whole_and_may_be_the_only_one():
    for name, family in FAMILIES.items():
        forced = call_grammar(family.format, TOOLS, REQUIRED)
        assert verdict(family, forced, "") == "...", name
        assert verdict(family, forced, "hello") == "", name
        cut = family.written(GET).partition("days")[0]
        assert verdict(family, forced, cut) == cut + "...", name
        for choice in (AUTO, REQUIRED):
            single = call_grammar(family.format, TOOLS, choice, parallel=False)
            assert verdict(family, single, family.written(GET)) is None, name
            for grammar in (single, forced) if family.format.single else (single,):
                assert verdict(family, grammar, family.written(*BOTH)) is not None, name


def test_arguments_follow_their_schemas():
    wrongs = {"days": (0, "0"), "size": ("M", "M"), "near": (1, "1"), "tags": ([1], "1"), "zoo": (1, "zoo")}
    wrongs["where"] = ({"note": "a"}, "note")
    bad = [({"city": "Oslo", name: value}, wrong) for name, (value, wrong) in wrongs.items()]
    bad.append(({"days": 1}, "days"))
    for name, family in FAMILIES.items():
        for choice in (AUTO, REQUIRED):
            grammar = call_grammar(family.format, TOOLS, choice)
            for arguments, wrong in bad:
                text = family.written(("get", arguments))
                assert verdict(family, grammar, text) == text[: text.rindex(wrong)], (name, arguments)
        assert verdict(family, grammar, family.written(("other", {}))), name


def test_a_function_that_is_not_offered_and_a_damaged_call_are_text():
    for name, family in FAMILIES.items():
        other, whole = family.written(("other", {"a": 1})), family.written(GET)
        damaged = whole[: whole.index("get") + 2]
        for text in (other, damaged, f"So: {damaged}"):
            assert read(family, text) == ("", text, []), name
            assert read(family, *text) == ("", text, []), name


def test_a_json_object_is_a_call_in_every_format():
    call = {"name": "get", "arguments": GET[1]}
    texts = json.dumps(call), json.dumps(call, indent=2), json.dumps(call).replace("arguments", "parameters")
    for name, family in MARKED.items():
        grammar = call_grammar(family.format, TOOLS, AUTO)
        for text in texts:
            for answer in (text, f"```json\n{text}\n```", f"```\n{text}\n```", f"\n{text}"):
                assert verdict(family, grammar, answer) is None, (name, answer)
                for cut in range(len(answer)):
                    assert read(family, answer[:cut], answer[cut:]) == ("", "", [GET]), (name, answer[:cut])
        # Other answers are text, also with text in front of the object.
        other = '{"name": "other", "arguments": {}}'
        for answer in (other, '{"name": "get"}', f"So: {json.dumps(call)}", "```py\n1\n```"):
            assert verdict(family, grammar, answer) is None, (name, answer)
            assert read(family, *answer) == ("", answer, []), (name, answer)
        begin = '```json\n{"name": "get", "arguments": {"city": '
        assert verdict(family, grammar, begin + "3}") == begin, name


def test_the_grammar_of_many_tools_can_be_followed():
    tools = tools_of(*({"name": f"tool_{number}", "parameters": SCHEMA} for number in range(128)))
    for name in ("hermes", "lfm2", "pythonic", "gemma4", "glm"):
        family = FAMILIES[name]
        grammar = call_grammar(family.format, tools, AUTO)
        for answer in (family.written(("tool_99", GET[1])), as_json("tool_99", GET[1]), "hello"):
            assert verdict(family, grammar, answer) is None, (name, answer)


def test_a_json_answer_beside_a_form_is_no_call():
    form = structured_output(response_format={"type": "json_object"})
    call = as_json(*GET)
    for name, family in MARKED.items():
        grammar = call_grammar(family.format, TOOLS, AUTO, form=form)
        assert verdict(family, grammar, call) is None, name
        reader = family.dialect.reader(TOOLS, False, family.tokenizer.bytes_of, bare=False)
        events = [*reader.read(Delta("", text=call, finish_reason=FinishReason.STOP))]
        assert content_and_calls(events) == (call, []), name
    for key, count in (("arguments", 0), ("parameters", 1)):
        answer = json.dumps({"name": "get", key: GET[1]})
        events = call_parser(FAMILIES["llama3"].format, TOOLS, bare=False).feed(answer, last=True)
        assert len(content_and_calls(events)[1]) == count


def test_python_texts_have_quotes_and_escapes_of_both_kinds():
    family = FAMILIES["lfm2"]
    grammar = call_grammar(family.format, TOOLS, AUTO)
    for written, value in [
        (r'"a\n\"b\" \\ \x41\u00d6"', 'a\n"b" \\ A\u00d6'),
        ("'it\\'s'", "it's"),
        ("'say \"a\"'", 'say "a"'),
        ('""', ""),
        (r"'\d'", r"\d"),
    ]:
        text = f"<|tool_call_start|>[get(city={written})]<|tool_call_end|>"
        called = ("", "", [("get", {"city": value})])
        assert verdict(family, grammar, text) is None, text
        for cut in range(len(text)):
            assert read(family, text[:cut], text[cut:]) == called, text[:cut]


def test_a_strict_function_that_is_not_enforced_is_refused():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}, "required": ["a"]}
    [tool] = tools_of({"name": "f", "parameters": schema | {"additionalProperties": False}, "strict": True})
    for name in ("lfm2", "pythonic", "gemma4", "functiongemma", "glm"):
        with pytest.raises(RequestError, match="the function f is strict, but this model"):
            pytest.fail(call_grammar(FAMILIES[name].format, [tool], AUTO))


def test_tools_are_described_in_the_form_of_a_template_that_has_none():
    messages, tools = for_template([{"role": "user", "content": "?"}], TOOLS, FAMILIES["deepseek_v31"].format)
    assert tools == []
    one = FAMILIES["deepseek_v31"].one("function_name", {"argument": "value"})
    assert one in messages[0]["content"]
    # LFM2's own template has tools and no calls; its tokens show the form.
    found = CallFormat.of(tokenizer(families.TURNS.replace("CALLS", ""), families.LFM))
    assert (found.name, found.native, found.shows_calls) == ("lfm2", True, False)
