"""Parsing of calls and content, however the text is cut into pieces."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.serve.dialect.call_parser import ArgumentsPiece, CallEnded, CallStarted, Content
from specinfer.serve.dialect.dialect import call_parser
from tests.operations import lines_run
from tests.unit.serve.dialect.families import FAMILIES, TAGGED_TOOLS, Family, tagged, tools_of
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of

TOOLS = (*tools_of({"name": "f"}, {"name": "g"}, {"name": "f.x-y:1"}), *TAGGED_TOOLS)
H = FAMILIES["hermes"].format
L = FAMILIES["llama3"].format
M = FAMILIES["mistral"].format
A = FAMILIES["mistral_args"].format
C = FAMILIES["qwen3_coder"].format
P = Family("{{ tools }}{{ name + '(' }}").format
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "g", "arguments": {"b": [1, {}]}}\n</tool_call>'
F, G = ("f", '{"a": "}"}'), ("g", '{"b": [1, {}]}')
NOW = tagged("now")
PUT = tagged("put", text="a\n\n</par <b>", size="S", n="2")
PUT_ARGUMENTS = '{"text": "a\\n\\n</par <b>", "size": "S", "n": 2}'
CASES = [
    (H, f"Let me see.\n\n{ONE}\n{TWO}", "Let me see.", [F, G]),
    (H, ONE.replace('{"a": "}"}', '{"\u00d6": "\\"}"}'), "", [("f", '{"\u00d6": "\\"}"}')]),
    (H, ONE.replace('"f"', '"f.x-y:1"'), "", [("f.x-y:1", F[1])]),
    (H, "a < b <tool_calls> </tool_call>", "a < b <tool_calls> </tool_call>", []),
    (H, f"<<tool_call{ONE}", "<<tool_call", [F]),
    # marks without a call
    (H, f"Write <tool_call> so:\n{ONE}", "Write <tool_call> so:", [F]),
    (M, 'Calls begin with [TOOL_CALLS]. So:\n[TOOL_CALLS] [{"name": "f", "arguments": {"a": "}"}}]',
        "Calls begin with [TOOL_CALLS]. So:", [F]),
    # incomplete calls
    (H, "a\n<tool_call>", "a\n<tool_call>", []),
    (H, ONE[:20], ONE[:20], []),
    (H, ONE[: ONE.index(': "}"')], "", [("f", '{"a"')]),
    (H, ONE[:-4], "", [F]),
    (H, f'{ONE}\n<tool_call>\n{{"name": "', "", [F]),
    (L, '\n<|python_tag|>{"name": "f", "parameters": {"a": "}"}}; '
        '{"name": "g", "parameters": {"b": [1, {}]}}', "", [F, G]),
    (L, '{"type": "function", "name":"f", "parameters":{"a": "}"}}', "", [F]),
    (L, '{ "name": "f",\n"parameters": {"a": "}"} }', "", [F]),
    (L, '{"name" : "f" , "parameters" : {"a": "}"}}', "", [F]),
    (L, "hello {", "hello {", []),
    (L, ' {"title": "x", "name": "f"}', ' {"title": "x", "name": "f"}', []),
    (L, '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
    (L, '{"name": "f"}', '{"name": "f"}', []),
    (L, '{"name": "f", "parameters": {"a": "}"}};', "", [F]),
    (L, ' {"name": "f", "param', ' {"name": "f", "param', []),
    (L, "  ", "  ", []),
    (M, 'Yes.\n[TOOL_CALLS][{"name": "f", "arguments": {"a": "}"}}]', "Yes.", [F]),
    (M, "[TOOL] [1]", "[TOOL] [1]", []),
    (M, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "}"}}, ', "", [F]),
    (A, "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    (C, f"Well.\n\n{NOW}\n{PUT}", "Well.", [("now", "{}"), ("put", PUT_ARGUMENTS)]),
    (C, "a <function=now>", "a <function=now>", []),
    (C, tagged("put", text="</parameter> a"), "", [("put", '{"text": "</parameter> a"}')]),
    (C, PUT[: PUT.index("</par <b")], "", [("put", '{"text": "a\\n')]),
    (C, PUT[: PUT.index("2\n")] + "2", "", [("put", PUT_ARGUMENTS[:-2])]),
    (C, NOW[:-3], "", [("now", "{}")]),
]  # fmt: skip


def read(call_format, *pieces):
    return content_and_calls(events_of(call_format, TOOLS, *pieces))


@pytest.mark.parametrize(("call_format", "text", "content", "calls"), CASES)
def test_an_answer_is_content_and_calls(call_format, text, content, calls):
    assert read(call_format, text) == (content, calls)
    assert read(call_format, *text) == (content, calls)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_however_an_answer_is_cut_it_says_the_same(data):
    call_format, text, *said = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert read(call_format, *pieces) == tuple(said)


def test_forms_without_a_mark_are_read_the_same_however_they_are_cut():
    for call_format, text, is_call in [
        (P, "[f(a=1)]", True),
        (P, " [ f(a=1)]", True),
        (P, "f(a) is no call", False),
        (P, "[[f(a)", False),
        (P, "<|python_tag|>[f(a=1)]", False),
        (L, '[{"name": "f", "parameters": {"a": 1}}]', False),
        (L, '<|python_tag|> {"name": "f", "parameters": {"a": 1}}', True),
    ]:
        whole = "" if is_call else text, [("f", '{"a": 1}')] * is_call
        for cut in range(len(text)):
            assert read(call_format, text[:cut], text[cut:]) == whole, text[:cut]


def test_arguments_go_out_as_they_come():
    reader = call_parser(H, TOOLS)
    assert reader.feed('hi \n<tool_call>\n{"name": "f", "arguments": ') == [Content("hi")]
    [started, piece] = reader.feed('{"a"')
    assert (started.name, piece) == ("f", ArgumentsPiece(0, '{"a"'))
    assert reader.feed(': "\\') == [ArgumentsPiece(0, ': "\\')]
    assert reader.feed('"') == [ArgumentsPiece(0, '"')]
    assert reader.feed('"}}') == [ArgumentsPiece(0, '"}'), CallEnded(0)]
    assert reader.feed("\n</tool_call>", last=True) == []
    assert reader.calls == 1


def test_tagged_texts_go_out_as_they_come_and_other_values_when_they_are_whole():
    reader = call_parser(C, TOOLS)
    assert reader.feed("hi\n<tool_call>\n<function=put") == [Content("hi")]
    [started] = reader.feed(">\n<parameter=te")
    assert isinstance(started, CallStarted)
    assert reader.feed("xt>\nab\n") == [ArgumentsPiece(0, '{"text": "ab')]
    assert reader.feed('\n"</p') == [ArgumentsPiece(0, '\\n\\n\\"</p')]
    assert reader.feed("\n</parameter>\n<parameter=n>\n1") == [ArgumentsPiece(0, '", "n": ')]
    assert reader.feed("2\n</parameter>\n") == [ArgumentsPiece(0, "12")]
    assert reader.feed("</function>\n</tool_call>") == [ArgumentsPiece(0, "}"), CallEnded(0)]


def test_only_a_possible_start_of_a_call_is_held_back():
    reader = call_parser(H, TOOLS)
    assert reader.feed("a <b") == [Content("a <b")]
    assert reader.feed(" \n<tool_") == []
    assert reader.feed("kit>\n") == [Content(" \n<tool_kit>")]
    assert reader.feed("", last=True) == [Content("\n")]
    reader = call_parser(L, TOOLS)
    assert reader.feed('{ "n') == []
    assert reader.feed('ot": 1') == [Content('{ "not": 1')]
    assert reader.feed(' {"name": "f"') == [Content(' {"name": "f"')]


def test_the_time_grows_with_the_length_of_the_answer():
    def cost(call_format, begin, repeated, times):
        return lines_run(partial(events_of, call_format, TOOLS, begin, *(repeated * times)))

    for call_format, begin, repeated in (
        (H, "", "<tool_call"),
        (H, "", ONE),
        (H, ONE[:45], '{"'),
        (L, "{", "\n"),
        (C, "", PUT),
        (C, "<tool_call>\n<function=put>\n<parameter=text>\n", "\n</para"),
    ):
        large = cost(call_format, begin, repeated, 200)
        assert large < 11 * cost(call_format, begin, repeated, 20), (call_format.name, repeated)


def test_text_behind_a_mark_without_a_call_goes_out():
    for call_format, mark in (
        (H, "<tool_call>"),
        (M, "[TOOL_CALLS]"),
        (A, "[TOOL_CALLS]"),
        (C, "<tool_call>"),
    ):
        parser = call_parser(call_format, TOOLS)
        sent = "".join(one.text for _ in range(100) for one in parser.feed(f"{mark} is no call. "))
        assert len(sent) > 2000, (call_format.name, "at most some hundred characters are held")
        assert len(parser._held) < 400
