"""Calls whose arguments are between tags (Qwen3-Coder)."""

import json
from functools import partial
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import CallFormat, Tool, ToolChoice, for_template
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.reader import ArgumentsPiece, CallEnded, CallStarted, Content
from specinfer.serve.dialect.tagged_calls import call_parser
from specinfer.structured_output import structured_output
from specinfer.tokenizer import ChatEncoder
from tests.operations import lines_run
from tests.unit.serve.dialect.families import PLAIN, Family, tokenizer, tools_of, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls

# As the model's own has it, less the words around it.
TEMPLATE = """\
{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endfor %}[assistant]"""
CODER = Family(tokenizer(TEMPLATE, text=("<tool_call>", "</tool_call>")))
SPECIAL = Family(tokenizer(TEMPLATE, special=("<tool_call>", "</tool_call>")))
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "size": {"$ref": "#/$defs/size"},
        "n": {"type": "integer", "minimum": 1},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["text", "size"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["x", "y"]}, "size": {"type": "string", "enum": ["S", "XL", "\u00d6<\n"]}},
}
TOOLS = tools_of(
    {"name": "put", "parameters": SCHEMA},
    {"name": "now"},
    {"name": "any", "parameters": {"type": "object"}},
)
AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")


@pytest.mark.parametrize("family", [CODER, SPECIAL], ids=["spelled", "special"])
@pytest.mark.parametrize(
    ("form", "text"),
    [({"response_format": {"type": "json_object"}}, '{"a": "<"}'), ({"regex": "<[a-z]+>"}, "<to>")],
)
def test_beside_a_form_an_answer_is_calls_or_the_form(family, form, text):
    grammar = call_grammar(family.format, TOOLS, AUTO, form=structured_output(**form))
    call = written("now")
    assert [verdict(family, grammar, one) for one in (text, call)] == [None, None]
    assert None not in [verdict(family, grammar, one) for one in ("", "so", f"so {call}", text + call)]


def written(name, **values):
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def parser():
    numbers = count()
    return call_parser(CODER.format, TOOLS, lambda: f"id{next(numbers)}")


def events_of(*pieces):
    reader = parser()
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def read(*pieces):
    content, calls = content_and_calls(events_of(*pieces))
    return content, [(call.name, call.arguments) for call in calls]


NOW = written("now")
PUT = written("put", text="a\n\n</par <b>", size="S", n="2")
TAGS = '["x", "y"]'
CASES = [
    (NOW, "", [("now", "{}")]),
    (f"Well.\n\n{NOW}\n{PUT}\n", "Well.", [("now", "{}"), ("put", None)]),
    ("<tool_call><function=now></function></tool_call> so", " so", [("now", "{}")]),
    (
        "<tool_call>\n<function=put>\n<parameter=text>a</parameter><parameter=n>3</parameter></function></tool_call>",
        "",
        [("put", '{"text": "a", "n": 3}')],
    ),
    # no calls
    ("<tool_call>\n<function=other>\n</function>", "<tool_call>\n<function=other>\n</function>", []),
    ("<tool_call> x", "<tool_call> x", []),
    ("a <function=now>", "a <function=now>", []),
    # incomplete calls, and texts that stop being a call
    (PUT[: PUT.index("</par <b")], "", [("put", '{"text": "a\\n')]),
    (PUT[: PUT.index("2\n")] + "2", "", [("put", '{"text": "a\\n\\n</par <b>", "size": "S", "n": ')]),
    (NOW[:-3], "", [("now", "{}")]),
    ("<tool_call>\n<function=now>\nx</tool_call>", "\nx</tool_call>", [("now", "")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_an_answer_is_content_and_calls(text, content, calls):
    expected = [
        (name, '{"text": "a\\n\\n</par <b>", "size": "S", "n": 2}' if arguments is None else arguments)
        for name, arguments in calls
    ]
    assert read(text) == (content, expected)
    assert read(*text) == (content, expected)


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
        _, [(_, arguments)] = read(written("put", **{name: text}))
        assert json.loads(arguments) == {name: value}, (name, text)
        assert isinstance(json.loads(arguments)[name], type(value)), (name, text)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_however_an_answer_is_cut_it_says_the_same(data):
    marks = [
        "<tool_call>",
        "<function=now>",
        "<parameter=text>",
        "<parameter=n>",
        "</parameter>",
        "</function>",
    ]
    parts = st.sampled_from([NOW, PUT, *marks, "</tool_call>", "\n", "<", '"', "1"])
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert read(*pieces) == read(text)


def test_texts_go_out_as_they_come_and_other_values_when_they_are_whole():
    reader = parser()
    assert reader.feed("hi\n<tool_call>\n<function=put") == [Content("hi")]
    assert reader.feed(">\n<parameter=te") == [CallStarted(0, "id0", "put")]
    assert reader.feed("xt>\nab\n") == [ArgumentsPiece(0, '{"text": "ab')]
    assert reader.feed('\n"</p') == [ArgumentsPiece(0, '\\n\\n\\"')]
    assert reader.feed("arameter>\n<parameter=n>\n1") == [ArgumentsPiece(0, '", "n": ')]
    assert reader.feed("2\n</parameter>\n") == [ArgumentsPiece(0, "12")]
    assert reader.feed("</function>\n</tool_call>") == [ArgumentsPiece(0, "}"), CallEnded(0)]
    assert reader.finish() == []


@pytest.mark.parametrize(
    "repeated", ["<tool_call><function=put>", "<parameter=text>", "\n", "</para", PUT, "<"]
)
def test_the_time_grows_with_the_length_of_the_answer(repeated):
    def cost(times):
        return lines_run(partial(events_of, "<tool_call><function=put><parameter=text>", *(repeated * times)))

    assert cost(200) < 11 * cost(20)


@pytest.mark.parametrize("family", [CODER, SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=["auto", "required"])
def test_calls_are_held_to_the_form_and_to_their_schemas(family, choice):
    grammar = call_grammar(family.format, TOOLS, choice)
    good = [
        NOW,
        PUT,
        f"{NOW}\n{PUT}",
        written("put", text="", size="XL", n="12", on="true", tags=TAGS, near="null"),
        written("put", text="a", size="\u00d6<\n"),
        written("any", a="1", b="x\ny"),
    ]
    assert {text: verdict(family, grammar, text) for text in good} == dict.fromkeys(good)
    for legal, rest in [
        ("<tool_call>\n<function=", "other>"),
        ("<tool_call>\n<function=now>\n<", "parameter=a>"),
        ("<tool_call>\n<function=put>\n<parameter=", "size>"),
        ("<tool_call>\n<function=put>\n<parameter=text>\na\n</parameter>\n<parameter=size>\n", "M"),
        (PUT.partition("2\n")[0], "0"),
    ]:
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
        parameters = {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
        }
        strict, lenient = (Tool("f", parameters, strict=strict) for strict in (True, False))
        assert call_grammar(CODER.format, [lenient], AUTO), schema
        if held:
            assert call_grammar(CODER.format, [strict], AUTO), schema
        else:
            with pytest.raises(RequestError, match="the function f is strict") as caught:
                pytest.fail(f"{schema!r}: {call_grammar(CODER.format, [strict], AUTO)}")
            assert caught.value.parameter == "tools", schema


def test_the_format_is_read_from_the_template_or_described_to_the_model():
    assert CODER.format.name == "qwen3_coder"
    assert CODER.format.native
    call = {"id": "1", "type": "function", "function": {"name": "put", "arguments": '{"text": "a", "n": 2}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    given_messages, shown = for_template(messages, TOOLS, CODER.format)
    same = written("put", text="a", n="2")
    assert same in ChatEncoder(CODER.tokenizer).render(given_messages, tools=shown).text
    forced = CallFormat.of(tokenizer(PLAIN), "qwen3_coder")
    (system, _, answer), shown = for_template(messages, TOOLS, forced)
    assert (answer["content"], shown) == (same, [])
    assert "<function=function_name>\n<parameter=argument>\nvalue\n</parameter>" in system["content"]
