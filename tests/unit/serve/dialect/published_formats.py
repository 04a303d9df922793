"""Chat templates of published models in small, and the calls that they write."""

import json
from dataclasses import dataclass, field
from functools import cached_property

from specinfer.serve.dialect.dialect import Dialect
from tests.unit.serve.dialect.families import Family, tokenizer

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
