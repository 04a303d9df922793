"""Formats of published models: small templates in their forms, the calls that they write, and answers."""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property

import pytest

from specinfer.errors import RequestError
from specinfer.request import Delta, FinishReason
from specinfer.serve.dialect.call_format import CallFormat, ToolChoice, for_template
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.call_parser import ReasoningPiece
from specinfer.serve.dialect.dialect import Dialect, call_parser
from specinfer.structured_output import structured_output
from specinfer.tokenizer import ChatEncoder
from tests.unit.serve.dialect.families import FAMILIES, Family, tokenizer, tools_of, verdict
from tests.unit.serve.dialect.whole_answers import content_and_calls

AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
SEPARATOR, CALL, CALL_END, CALLS, CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("sep", "call\u2581begin", "call\u2581end", "calls\u2581begin", "calls\u2581end")
)
TOOLS_SHOWN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
TURNS = TOOLS_SHOWN + "{% for m in messages %}[{{ m.role }}]{{ m.content }}CALLS{% endfor %}[assistant]"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}ONE{% endfor %}"
LIST = "{% if m.tool_calls %}BEGIN" + EACH + "END{% endif %}"
COMMA = "{{ ', ' if not loop.last }}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
# Values as Python writes them, and as Gemma does.
PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{{ '\"' + v + '\"' if v is string else v }}" + COMMA + "{% endfor %})"
)
GEMMA = """\
{% macro written(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ v | tojson }}
{%- elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ written(w) }}
{{- ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for w in v %}{{ written(w) }}
{{- ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"""
GEMMA_CALL = (
    "BEGINcall:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ k }}:{{ written(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}END"
)
GLM = (
    "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
PHI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{% set message = m %}[system]{{ m['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}[assistant]"
)


def turns(calls, one):
    return TURNS.replace("CALLS", calls).replace("ONE", one)


def listed(begin, end, one):
    return turns(LIST.replace("BEGIN", begin).replace("END", end), one + COMMA)


def gemma(begin, end, quote):
    call = GEMMA_CALL.replace("BEGIN", begin).replace("END", end)
    return GEMMA.replace("QUOTE", quote) + turns(EACH, call)


def written(value):
    return json.dumps(value, ensure_ascii=False)


def as_json(name, arguments):
    return written({"name": name, "arguments": arguments})


def as_python(name, arguments):
    texts = [f"{key}={written(one) if isinstance(one, str) else one}" for key, one in arguments.items()]
    return f"{name}({', '.join(texts)})"


def as_gemma(name, arguments, quote):
    def value(one):
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(one[key])}" for key in sorted(one)) + "}"
        if isinstance(one, list):
            return f"[{','.join(map(value, one))}]"
        return f"{quote}{one}{quote}" if isinstance(one, str) else json.dumps(one)

    return f"call:{name}{value(arguments)}"


def as_glm(name, arguments):
    tags = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{one if isinstance(one, str) else written(one)}</arg_value>\n"
        for key, one in arguments.items()
    )
    return f"<tool_call>{name}\n{tags}</tool_call>"


@dataclass
class Case:
    """A template, the tokens of it that are special, and its calls: `begin`, calls with `between`, `end`."""

    template: str
    special: tuple[str, ...]
    one: object  # the text of a call, from its name and arguments
    begin: str = ""
    between: str = ", "
    end: str = ""
    takes_text: bool = True  # before calls
    native: bool = True
    text: tuple[str, ...] = field(default=())

    @cached_property
    def family(self):
        return Family(tokenizer(self.template, self.special, self.text))

    @cached_property
    def dialect(self):
        return Dialect.of(self.family.tokenizer)

    def written(self, *calls):
        return self.begin + self.between.join(self.one(*call) for call in calls) + self.end


def deepseek_v3(name, arguments):
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{written(arguments)}\n```{CALL_END}"


def deepseek(one, between):
    calls = CALLS + EACH.replace("{% endfor", between + "{% endfor") + CALLS_END
    return turns("{% if m.tool_calls %}" + calls + "{% endif %}", one)


V3 = (
    f"{CALL}{{{{ c.type }}}}{SEPARATOR}{{{{ f.name }}}}\n```json\n{{{{ f.arguments|tojson }}}}\n```{CALL_END}"
)
V31 = f"{CALL}{{{{ f.name + '{SEPARATOR}' + f.arguments }}}}{CALL_END}"  # arguments must be a text
GRANITE_4 = """\
{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}{{ '\n' if not loop.first }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{% endfor %}[assistant]"""
QUOTE = '<|"|>'
LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
CASES = {
    "hermes": Case(
        GRANITE_4, ("<tool_call>", "</tool_call>"), lambda *c: f"<tool_call>\n{as_json(*c)}\n</tool_call>",
        between="\n",
    ),
    "glm": Case(turns(EACH, GLM), (), as_glm, between="\n", text=("<tool_call>", "</tool_call>")),
    "deepseek_v3": Case(
        deepseek(V3, "{{ '\n' if not loop.last }}"), (), deepseek_v3, CALLS, "\n", CALLS_END,
        text=(CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
    ),
    "deepseek_v31": Case(
        deepseek(V31, "").removeprefix(TOOLS_SHOWN), (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
        lambda name, arguments: f"{CALL}{name}{SEPARATOR}{written(arguments)}{CALL_END}",
        CALLS, "", CALLS_END, native=False,
    ),
    "lfm2": Case(listed(LFM[0] + "[", "]" + LFM[1], PYTHON), LFM, as_python, LFM[0] + "[", end="]" + LFM[1]),
    "lfm2_json": Case(listed(LFM[0] + "[", "]" + LFM[1], JSON), LFM, as_json, LFM[0] + "[", end="]" + LFM[1]),
    "pythonic": Case(
        listed("[", "]", PYTHON.replace("{{ f.name }}(", "{{ f.name + '(' }}")), (), as_python, "[", end="]",
        takes_text=False,
    ),
    "gemma4": Case(
        gemma("<|tool_call>", "<tool_call|>", QUOTE), ("<|tool_call>", "<tool_call|>", QUOTE),
        lambda *c: f"<|tool_call>{as_gemma(*c, QUOTE)}<tool_call|>", between="",
    ),
    "functiongemma": Case(
        gemma("<start_function_call>", "<end_function_call>", "<escape>"), (),
        lambda *c: f"<start_function_call>{as_gemma(*c, '<escape>')}<end_function_call>", between="",
    ),
    "granite3": Case(
        turns("", "") + "{# respond only with <|tool_call|> #}", ("<|tool_call|>",), as_json,
        "<|tool_call|>[", end="]",
    ),
    "phi4": Case(
        turns(EACH, f"<|tool_call|>{JSON}<|/tool_call|>"), ("<|tool_call|>", "<|/tool_call|>"),
        lambda *c: f"<|tool_call|>{as_json(*c)}<|/tool_call|>", between="",
    ),
    "phi4_list": Case(
        PHI, ("<|tool_call|>", "<|/tool_call|>"), as_json, "<|tool_call|>[", end="]<|/tool_call|>",
        native=False,
    ),
    "functools": Case(listed("functools[", "]", JSON), (), as_json, "functools[", end="]"),
}  # fmt: skip
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
