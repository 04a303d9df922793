"""Parsing of calls and content, however the text is cut into pieces."""

from functools import partial
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.serve.dialect.call_parser import CallParser
from specinfer.serve.dialect.reader import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    Content,
)
from tests.operations import lines_run
from tests.unit.serve.dialect.families import FAMILIES
from tests.unit.serve.dialect.whole_answers import content_and_calls

H = FAMILIES["hermes"].format
L = FAMILIES["llama3"].format
M = FAMILIES["mistral"].format
A = FAMILIES["mistral_args"].format
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'
TWO = '<tool_call>{"arguments": {"b": [1, {}]}, "name": "g"}</tool_call>'
CUT = ONE[: ONE.index(': "}"')]
F, G = ("f", '{"a": "}"}'), ("g", '{"b": [1, {}]}')


def parser(call_format):
    numbers = count()
    return CallParser(call_format, ["f", "g", "f.x-y:1"], lambda: f"id{next(numbers)}")


def events_of(call_format, *pieces):
    reader = parser(call_format)
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def read(call_format, *pieces):
    """Return the content, and name and arguments of each call; calls must arrive in order."""
    events = events_of(call_format, *pieces)
    open_call, started = None, 0
    for event in events:
        match event:
            case CallStarted(index, call_id, _):
                assert (open_call, index, call_id) == (None, started, f"id{started}")
                open_call, started = index, started + 1
            case ArgumentsPiece(index, text):
                assert index == open_call
                assert text
            case CallEnded(index):
                assert index == open_call
                open_call = None
            case Content(text):
                assert open_call is None
                assert text
    assert open_call is None
    content, calls = content_and_calls(events)
    return content, [(call.name, call.arguments) for call in calls]


CASES = [
    (H, "", "", []),
    (H, "hello\n", "hello\n", []),
    (H, ONE, "", [F]),
    (H, f"Let me see.\n\n{ONE}\n{TWO}\n", "Let me see.", [F, G]),
    (H, f" {ONE} then {TWO}", " then", [F, G]),
    (H, f"{ONE} and so\n on", " and so\n on", [F]),
    (H, '<tool_call>{"id": "7", "type": "x", "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    (H, '<tool_call>{"name": "f", "parameters": {"\u00d6": "\\"}"}}', "", [("f", '{"\u00d6": "\\"}"}')]),
    (H, '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    (H, '<tool_call>{"name": "f.x-y:1", "arguments": {}}</tool_call>', "", [("f.x-y:1", "{}")]),
    (H, "a < b <tool_calls> </tool_call>", "a < b <tool_calls> </tool_call>", []),
    # no calls
    (H, "<tool_call>", "<tool_call>", []),
    (H, "a\n<tool_call> f()</tool_call>", "a\n<tool_call> f()</tool_call>", []),
    (H, f"<tool_call><tool_call>{ONE[11:]}", "<tool_call>", [F]),
    (H, f"<<tool_call{ONE}", "<<tool_call", [F]),
    (H, ONE.replace('"f"', '"unknown"'), ONE.replace('"f"', '"unknown"'), []),
    (H, ONE.replace('"f"', "f"), ONE.replace('"f"', "f"), []),
    (H, ONE.replace('"f"', '"f\\x"'), ONE.replace('"f"', '"f\\x"'), []),
    (H, ONE.replace("arguments", "more"), ONE.replace("arguments", "more"), []),
    (H, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (H, '<tool_call>{"name": "f", "arguments": "{}"}', '<tool_call>{"name": "f", "arguments": "{}"}', []),
    (H, '<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"arguments": {"a": 1}}', []),
    (H, '<tool_call>{"name": "f", "name": "g"', '<tool_call>{"name": "f", "name": "g"', []),
    # incomplete calls
    (H, ONE[:20], ONE[:20], []),
    (H, CUT, "", [("f", '{"a"')]),
    (H, ONE[:-4], "", [F]),
    (H, f"{ONE}\n<tool_", "", [F]),
    (H, f"{ONE}\n<tool_call>\n{{", "", [F]),
    (H, f'{ONE}\n<tool_call>\n{{"name": "', "", [F]),
    # texts that stop being a call
    (H, '<tool_call>{"name": "f", "arguments": {"a": ]} x', "]} x", [("f", '{"a": ')]),
    (H, f'<tool_call>{{"name": "f", "arguments": {{"a": {TWO}', "", [("f", '{"a": '), G]),
    (H, '<tool_call>{"name": "f", "arguments": {}}, 1', ", 1", [("f", "{}")]),
    (H, '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}', ', "arguments": {}}', [("f", "{}")]),
    (L, '{"name": "f", "parameters": {"a": "}"}}', "", [F]),
    (L, '\n<|python_tag|>{"name": "f", "parameters": {"a": "}"}}; {"type": "function", "name": "g", '
        '"parameters": {"b": [1, {}]}} ', "", [F, G]),
    (L, '; '.join(3 * ['{"name": "f", "parameters": {}}']), "", 3 * [("f", "{}")]),
    (L, "hello {", "hello {", []),
    (L, ' {"title": "x", "name": "f"}', ' {"title": "x", "name": "f"}', []),
    (L, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (L, '{"name": "f", "parameters": {}}; or {"name": "f", "parameters": {}}',
        "; or {\"name\": \"f\", \"parameters\": {}}", [("f", "{}")]),
    (L, '{"name": "f", "parameters": {}};', "", [("f", "{}")]),
    (L, '{"name": "f", "parameters": {}} is it', " is it", [("f", "{}")]),
    (L, ' {"name": "f", "param', ' {"name": "f", "param', []),
    (L, "  ", "  ", []),
    (M, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "}"}}, {"name": "g", "arguments": {"b": [1, {}]}}]',
        "", [F, G]),
    (M, 'Yes.\n[TOOL_CALLS][{"name": "f", "arguments": {"a": "}"}, "id": "abcdefghi"}]', "Yes.", [F]),
    (M, "[TOOL_CALLS] f", "[TOOL_CALLS] f", []),
    (M, "[TOOL] [1]", "[TOOL] [1]", []),
    (M, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, ', "", [("f", "{}")]),
    (M, '[TOOL_CALLS] [{"name": "f", "arguments": {}} ok', " ok", [("f", "{}")]),
    (A, '[TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]g[ARGS]{"b": [1, {}]}', "", [F, G]),
    (A, 'So: [TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{"a": "}"}', "So:", [F]),
    (A, '[TOOL_CALLS]f{"a": "}"}', "", [F]),
    (A, "[TOOL_CALLS]f[ARG]{}", "[TOOL_CALLS]f[ARG]{}", []),
    (A, "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    (A, "[TOOL_CALLS]f[CALL_ID]ab-[ARGS]{}", "[TOOL_CALLS]f[CALL_ID]ab-[ARGS]{}", []),
    (A, "[TOOL_CALLS]h[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("call_format", "text", "content", "calls"), CASES)
def test_an_answer_is_content_and_calls(call_format, text, content, calls):
    assert read(call_format, text) == (content, calls)
    assert read(call_format, *text) == (content, calls)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_however_an_answer_is_cut_it_says_the_same(data):
    call_format = data.draw(st.sampled_from([H, L, M, A]))
    known = [text for of, text, _, _ in CASES if of is call_format]
    marks = [
        "<tool_call>",
        "[TOOL_CALLS]",
        '{"name": "f", ',
        '"arguments": {',
        "}",
        ' "\\',
        "\n",
        "; ",
        "[ARGS]",
    ]
    parts = st.one_of(st.sampled_from(known), st.sampled_from(marks), st.text(max_size=3))
    text = "".join(data.draw(st.lists(parts, max_size=5)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert read(call_format, *pieces) == read(call_format, text)


def test_arguments_go_out_as_they_come():
    reader = parser(H)
    assert reader.feed('hi \n<tool_call>\n{"name": "f", "arguments": ') == [Content("hi")]
    assert reader.feed('{"a"') == [CallStarted(0, "id0", "f"), ArgumentsPiece(0, '{"a"')]
    assert reader.feed(': "\\"') == [ArgumentsPiece(0, ': "\\"')]
    assert reader.feed('"}}') == [ArgumentsPiece(0, '"}'), CallEnded(0)]
    assert reader.feed("\n</tool_call>") == []
    assert (reader.finish(), reader.calls) == ([], 1)


def test_only_a_possible_start_of_a_call_is_held_back():
    reader = parser(H)
    assert reader.feed("a <b") == [Content("a <b")]
    assert reader.feed(" \n<tool_") == []
    assert reader.feed("kit>") == [Content(" \n<tool_kit>")]
    assert reader.feed("\n") == []
    assert reader.finish() == [Content("\n")]
    reader = parser(L)
    assert reader.feed("{") == []
    assert reader.feed('"n') == []
    assert reader.feed('ot": 1') == [Content('{"not": 1')]
    assert reader.feed(' {"name": "f"') == [Content(' {"name": "f"')]


@pytest.mark.parametrize(
    "repeated",
    ["<tool_call>", "<tool_call>{", '<tool_call>{"arguments": {"a": [', "\n", '"', ONE, '{"name": "'],
)
@pytest.mark.parametrize("call_format", [H, L], ids=["hermes", "llama3"])
def test_the_time_grows_with_the_length_of_the_answer(call_format, repeated):
    def cost(times):
        return lines_run(partial(events_of, call_format, *(repeated * times)))

    small, large = cost(20), cost(200)
    assert large < 11 * small
