"""Formats of published models: their templates are recognised, and their calls are held and read."""

import json
import re

import pytest

from specinfer.errors import RequestError
from specinfer.request import Delta, FinishReason
from specinfer.serve.dialect.call_format import CallFormat, ToolChoice, for_template
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.call_parser import ReasoningPiece
from specinfer.serve.dialect.dialect import call_parser
from specinfer.structured_output import structured_output
from specinfer.tokenizer import ChatEncoder
from tests.unit.serve.dialect.families import FAMILIES, tokenizer, tools_of, verdict
from tests.unit.serve.dialect.published_formats import CALL, CALL_END, CASES, LFM, SEPARATOR, TURNS, as_json
from tests.unit.serve.dialect.whole_answers import content_and_calls

AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "near": {"type": "boolean"},
        "size": {"enum": ["S", "L"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "note": {"type": "string"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["city"],
    "additionalProperties": False,
}
# As the clients of tests/clients send it.
ZOO = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Oslo"], "type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = tools_of(
    {"name": "get", "parameters": SCHEMA, "strict": True},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "weather", "parameters": ZOO, "strict": True},
)
GET = ("get", {"city": "Oslo", "days": 2})
FULL = (
    "get",
    {
        **{"city": "New \u00d6slo", "days": 12, "near": True, "size": "L", "tags": ["a, b", "}"]},
        "where": {"lat": -1.5, "note": "x)"},
    },
)
CALLED = [
    (GET,),
    (FULL,),
    (("now", {}),),
    (("weather", {"city": "Lisbon", "unit": "C"}),),
    (GET, ("now", {})),
]


def read(dialect, *pieces, tools=TOOLS):
    """Content, and the calls with arguments as values, of an answer in pieces."""
    reader = dialect.reader(tools, False)
    deltas = [Delta("", text=piece, token_ids=(1,)) for piece in pieces]
    deltas.append(Delta("", finish_reason=FinishReason.STOP))
    events = [event for delta in deltas for event in reader.read(delta)]
    thoughts = "".join(one.text for one in events if isinstance(one, ReasoningPiece))
    content, calls = content_and_calls([one for one in events if not isinstance(one, ReasoningPiece)])
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in calls]


def test_a_template_is_recognised_and_writes_what_is_read():
    for name, case in CASES.items():
        call_format = case.family.format
        assert (call_format.name, call_format.native) == (name, case.native)
        for calls in CALLED:
            sent = [
                {
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": f, "arguments": json.dumps(given)},
                }
                for f, given in calls
            ]
            asked = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": None, "tool_calls": sent},
            ]
            messages, tools = for_template(asked, TOOLS, call_format)
            prompt = ChatEncoder(case.family.tokenizer).render(messages, tools=tools).text
            written = prompt.rpartition("[assistant]")[0].rpartition("[assistant]")[2]
            assert '"weather"' in prompt.partition("[assistant]")[0], name
            assert read(case.dialect, written) == ("", "", list(calls)), (name, written)


def test_answers_are_held_to_the_form_and_read_however_they_are_cut():
    for name, case in CASES.items():
        free, forced = (call_grammar(case.family.format, TOOLS, choice) for choice in (AUTO, REQUIRED))
        for calls in CALLED:
            text = case.written(*calls)
            for grammar in (free, forced):
                assert verdict(case.family, grammar, text) is None, (name, text)
            texts = [("", text)] + ([("So:", f"So:\n{text}")] if case.takes_text else [])
            for content, answer in texts:
                assert verdict(case.family, free, answer) is None, (name, answer)
                assert read(case.dialect, *answer) == ("", content, list(calls)), (name, answer)
                for cut in range(len(answer)):
                    pieces = answer[:cut], answer[cut:]
                    assert read(case.dialect, *pieces) == ("", content, list(calls)), (name, pieces)
        for text in (
            "",
            "hello",
            'a {"name": "get"} [',
            "```json\n[1]\n```",
            '{"answer": [1]}',
            "import functools",
        ):
            assert verdict(case.family, free, text) is None, (name, text)
            assert read(case.dialect, *text) == ("", text, []), (name, text)


def test_arguments_follow_their_schemas():
    bad = [
        {"city": "Oslo", "days": 0},
        {"city": "Oslo", "size": "M"},
        {"city": "Oslo", "near": 1},
        {"city": "Oslo", "tags": [1]},
        {"city": "Oslo", "where": {"note": "a"}},
        {"city": "Oslo", "zoo": 1},
        {"days": 1},
    ]
    for name, case in CASES.items():
        for choice in (AUTO, REQUIRED):
            grammar = call_grammar(case.family.format, TOOLS, choice)
            for arguments in bad:
                assert verdict(case.family, grammar, case.written(("get", arguments))), (name, arguments)
        assert verdict(case.family, grammar, case.written(("other", {}))), name


def test_a_function_that_is_not_offered_and_a_damaged_call_are_text():
    for name, case in CASES.items():
        other, whole = case.written(("other", {"a": 1})), case.written(GET)
        damaged = whole[: whole.index("get") + 2]
        for text in (other, damaged, f"So: {damaged}"):
            assert read(case.dialect, text) == ("", text, []), name
            assert read(case.dialect, *text) == ("", text, []), name


def test_a_json_object_is_a_call_in_every_format():
    call = {"name": "get", "arguments": GET[1]}
    for name, case in CASES.items():
        grammar = call_grammar(case.family.format, TOOLS, AUTO)
        for text in (
            json.dumps(call),
            json.dumps(call, indent=2),
            json.dumps(call).replace("arguments", "parameters"),
        ):
            for answer in (text, f"```json\n{text}\n```", f"```\n{text}\n```", f"\n{text}"):
                assert verdict(case.family, grammar, answer) is None, (name, answer)
                for cut in range(len(answer)):
                    assert read(case.dialect, answer[:cut], answer[cut:]) == ("", "", [GET]), (
                        name,
                        answer[:cut],
                    )
        # Other answers are text, also with text in front of the object.
        for answer in (
            '{"name": "other", "arguments": {}}',
            '{"name": "get"}',
            f"So: {json.dumps(call)}",
            "```py\n1\n```",
        ):
            assert verdict(case.family, grammar, answer) is None, (name, answer)
            assert read(case.dialect, *answer) == ("", answer, []), (name, answer)
        begin = '```json\n{"name": "get", "arguments": {"city": '
        assert verdict(case.family, grammar, begin + "3}") == begin, name


def test_the_grammar_of_many_tools_can_be_followed():
    tools = tools_of(*({"name": f"tool_{number}", "parameters": SCHEMA} for number in range(128)))
    for name in ("hermes", "lfm2", "pythonic", "gemma4", "glm"):
        case = CASES[name]
        grammar = call_grammar(case.family.format, tools, AUTO)
        for answer in (case.written(("tool_99", GET[1])), as_json("tool_99", GET[1]), "hello"):
            assert verdict(case.family, grammar, answer) is None, (name, answer)


def test_a_json_answer_beside_a_form_is_no_call():
    form = structured_output(response_format={"type": "json_object"})
    call = json.dumps({"name": "get", "arguments": GET[1]})
    for name, case in CASES.items():
        grammar = call_grammar(case.family.format, TOOLS, AUTO, form=form)
        assert verdict(case.family, grammar, call) is None, name
        events = [
            *case.dialect.reader(TOOLS, False, bare=False).read(
                Delta("", text=call, finish_reason=FinishReason.STOP)
            )
        ]
        assert content_and_calls(events) == (call, []), name
    llama3 = FAMILIES["llama3"].format
    for key, count in (("arguments", 0), ("parameters", 1)):
        answer = json.dumps({"name": "get", key: GET[1]})
        events = call_parser(llama3, TOOLS, bare=False).feed(answer, last=True)
        assert len(content_and_calls(events)[1]) == count


def test_python_texts_have_quotes_and_escapes_of_both_kinds():
    case = CASES["lfm2"]
    grammar = call_grammar(case.family.format, TOOLS, AUTO)
    for written, value in [
        (r'"a\n\"b\" \\ \x41\u00d6"', 'a\n"b" \\ A\u00d6'),
        ("'it\\'s'", "it's"),
        ("'say \"a\"'", 'say "a"'),
        ('""', ""),
        (r"'\d'", r"\d"),
    ]:
        text = f"<|tool_call_start|>[get(city={written})]<|tool_call_end|>"
        assert verdict(case.family, grammar, text) is None, text
        for cut in range(len(text)):
            assert read(case.dialect, text[:cut], text[cut:]) == ("", "", [("get", {"city": value})]), text[
                :cut
            ]


def test_a_strict_function_that_is_not_enforced_is_refused():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}, "required": ["a"]}
    [tool] = tools_of({"name": "f", "parameters": schema | {"additionalProperties": False}, "strict": True})
    for name in ("lfm2", "pythonic", "gemma4", "functiongemma", "glm"):
        with pytest.raises(RequestError, match="the function f is strict, but this model"):
            pytest.fail(call_grammar(CASES[name].family.format, [tool], AUTO))


def test_tools_are_described_in_the_form_of_a_template_that_has_none():
    case = CASES["deepseek_v31"]
    messages, tools = for_template([{"role": "user", "content": "?"}], TOOLS, case.family.format)
    assert tools == []
    example = re.escape(f'{CALL}function_name{SEPARATOR}{{"argument": "value"}}{CALL_END}')
    assert re.search(example, messages[0]["content"])
    # LFM2's own template has tools and no calls; its tokens show the form.
    own = tokenizer(TURNS.replace("CALLS", ""), LFM)
    found = CallFormat.of(own)
    assert (found.name, found.native, found.shows_calls) == ("lfm2", True, False)
