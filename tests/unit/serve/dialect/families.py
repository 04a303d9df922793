"""Small tokenizers with small templates, one for each family of models that calls tools, and its calls."""

import json
from dataclasses import dataclass
from functools import cached_property

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specinfer.grammar.grammar import GrammarCompiler
from specinfer.serve.dialect.call_format import CallFormat, for_template
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.fields.conversation import Function, read_tools
from specinfer.structured_output import structured_output
from specinfer.tokenizer import ChatEncoder, Tokenizer
from tests.schemas import closed
from tests.unit.tokenizer.made_up import CHARACTER

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
QWEN = """\
{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}[assistant]"""
LLAMA = """\
{% if tools is defined and tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% for m in messages %}<|start_header_id|>{{ m.role }}{% if m.tool_calls %}
{% if m.tool_calls | length != 1 %}{{ raise_exception("no more than single tool-calls") }}{% endif %}
{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception("9 letters") }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- ', ' if not loop.last }}{% endfor %}]{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL_ARGS = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
MISTRAL_IDS = MISTRAL_ARGS.replace("[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]")
THINKING = """{% if false %}</think>{% endif %}{{ '<think>\n' if enable_thinking }}"""


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


# As the model's own has it, less the words around it.
CODER_TEMPLATE = """\
{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endfor %}[assistant]"""


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


def as_hermes(*call):
    return f"<tool_call>\n{as_json(*call)}\n</tool_call>"


def as_llama(name, arguments):
    return written({"name": name, "parameters": arguments})


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


def as_tags(name, arguments):
    texts = {key: one if isinstance(one, str) else written(one) for key, one in arguments.items()}
    return tagged(name, **texts)


def deepseek_v3(name, arguments):
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{written(arguments)}\n```{CALL_END}"


def deepseek(one, between):
    calls = CALLS + EACH.replace("{% endfor", between + "{% endfor") + CALLS_END
    return turns("{% if m.tool_calls %}" + calls + "{% endif %}", one)


def tokenizer(template=None, special=(), text=(), tool_template=None):
    """The 256 bytes, </s> (256), and added tokens: special ones, and others that are text."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={CHARACTER[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("</s>", *special)])
    backend.add_tokens([AddedToken(name, special=False) for name in text])
    named = {"default": template, "tool_use": tool_template}
    templates = {name: source for name, source in named.items() if source is not None}
    return Tokenizer(backend, eos_token_ids=[256], templates=templates)


@dataclass
class Family:
    """A template, the tokens of it that are special, and its calls: `begin`, calls with `between`, `end`."""

    template: str
    special: tuple[str, ...] = ()
    one: object = None  # the text of a call, from its name and arguments
    begin: str = ""
    between: str = ", "
    end: str = ""
    text: tuple[str, ...] = ()  # added tokens that are text
    takes_text: bool = True  # before calls
    native: bool = True
    name: str = "auto"

    @cached_property
    def tokenizer(self):
        return tokenizer(self.template, self.special, self.text)

    @cached_property
    def format(self):
        return CallFormat.of(self.tokenizer, self.name)

    @cached_property
    def compiler(self):
        return GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size)

    @cached_property
    def dialect(self):
        return Dialect.of(self.tokenizer, self.name)

    def written(self, *calls):
        return self.begin + self.between.join(self.one(*call) for call in calls) + self.end

    def prompt(self, messages, tools):
        given, shown = for_template(messages, tools, self.format)
        return ChatEncoder(self.tokenizer).render(given, tools=shown).text


V3 = f"{CALL}{{{{ c.type }}}}{SEPARATOR}{{{{ f.name }}}}\n```json\n"
V3 += f"{{{{ f.arguments|tojson }}}}\n```{CALL_END}"
V31 = f"{CALL}{{{{ f.name + '{SEPARATOR}' + f.arguments }}}}{CALL_END}"  # arguments must be a text
GRANITE_4 = """\
{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}{{ '\n' if not loop.first }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{% endfor %}[assistant]"""
SEVERAL = LLAMA.replace("single tool-calls", "calls")
QUOTE = '<|"|>'
LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM_LIST = (LFM[0] + "[", "]" + LFM[1])
QWEN_MARKS = ("<tool_call>", "</tool_call>")
MARKS = (*QWEN_MARKS, "<think>", "</think>")
FAMILIES = {
    # In Qwen's vocabulary <tool_call> is one token, but text; other models spell it, or have it special.
    "hermes": Family(QWEN, (), as_hermes, between="\n"),
    "hermes, text": Family(QWEN, (), as_hermes, between="\n", text=MARKS),
    "hermes, special": Family(QWEN, MARKS, as_hermes, between="\n"),
    "hermes, described": Family(PLAIN, (), as_hermes, between="\n", native=False, name="hermes"),
    "llama3": Family(LLAMA, ("<|python_tag|>",), as_llama, between="; ", takes_text=False),
    "llama3, several": Family(SEVERAL, (), as_llama, between="; ", takes_text=False),  # and no tag
    "mistral": Family(MISTRAL, ("[TOOL_CALLS]",), as_json, "[TOOL_CALLS] [", end="]"),
    "mistral, spelled": Family(MISTRAL, (), as_json, "[TOOL_CALLS] [", end="]"),
    "mistral_args": Family(
        MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]"),
        lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{written(given)}", between="",
    ),
    "mistral_ids": Family(
        MISTRAL_IDS, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        lambda name, given: f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{written(given)}", between="",
    ),
    "qwen3_coder": Family(CODER_TEMPLATE, (), as_tags, between="\n", text=QWEN_MARKS),
    "qwen3_coder, special": Family(CODER_TEMPLATE, QWEN_MARKS, as_tags, between="\n"),
    "hermes, joined": Family(GRANITE_4, QWEN_MARKS, as_hermes, between="\n"),
    "glm": Family(turns(EACH, GLM), (), as_glm, between="\n", text=QWEN_MARKS),
    "deepseek_v3": Family(
        deepseek(V3, "{{ '\n' if not loop.last }}"), (), deepseek_v3, CALLS, "\n", CALLS_END,
        text=(CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
    ),
    "deepseek_v31": Family(
        deepseek(V31, "").removeprefix(TOOLS_SHOWN), (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
        lambda name, arguments: f"{CALL}{name}{SEPARATOR}{written(arguments)}{CALL_END}",
        CALLS, "", CALLS_END, native=False,
    ),
    "lfm2": Family(listed(*LFM_LIST, PYTHON), LFM, as_python, LFM_LIST[0], end=LFM_LIST[1]),
    "lfm2_json": Family(listed(*LFM_LIST, JSON), LFM, as_json, LFM_LIST[0], end=LFM_LIST[1]),
    "pythonic": Family(
        listed("[", "]", PYTHON.replace("{{ f.name }}(", "{{ f.name + '(' }}")), (), as_python, "[", end="]",
        takes_text=False,
    ),
    "gemma4": Family(
        gemma("<|tool_call>", "<tool_call|>", QUOTE), ("<|tool_call>", "<tool_call|>", QUOTE),
        lambda *c: f"<|tool_call>{as_gemma(*c, QUOTE)}<tool_call|>", between="",
    ),
    "functiongemma": Family(
        gemma("<start_function_call>", "<end_function_call>", "<escape>"), (),
        lambda *c: f"<start_function_call>{as_gemma(*c, '<escape>')}<end_function_call>", between="",
    ),
    "granite3": Family(
        turns("", "") + "{# respond only with <|tool_call|> #}", ("<|tool_call|>",), as_json,
        "<|tool_call|>[", end="]",
    ),
    "phi4": Family(
        turns(EACH, f"<|tool_call|>{JSON}<|/tool_call|>"), ("<|tool_call|>", "<|/tool_call|>"),
        lambda *c: f"<|tool_call|>{as_json(*c)}<|/tool_call|>", between="",
    ),
    "phi4_list": Family(
        PHI, ("<|tool_call|>", "<|/tool_call|>"), as_json, "<|tool_call|>[", end="]<|/tool_call|>",
        native=False,
    ),
    "functools": Family(listed("functools[", "]", JSON), (), as_json, "functools[", end="]"),
}  # fmt: skip

WEATHER = closed({"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}}, "city")


def tools_of(*functions):
    """The tools that functions are, each described as requests do."""
    return read_tools([Function(**one) for one in functions])


TOOLS = tools_of({"name": "get", "parameters": WEATHER, "description": "Weather."}, {"name": "get_time"})
PROPERTIES = {
    "text": {"type": "string"},
    "size": {"$ref": "#/$defs/size"},
    "n": {"type": "integer", "minimum": 1},
    "on": {"type": "boolean"},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
DEFINITIONS = {"tag": {"enum": ["x", "y"]}, "size": {"type": "string", "enum": ["S", "XL", "\u00d6<\n"]}}
TAGGED_SCHEMA = closed(PROPERTIES, "text", "size") | {"$defs": DEFINITIONS}
TAGGED_TOOLS = tools_of(
    {"name": "put", "parameters": TAGGED_SCHEMA},
    {"name": "now"},
    {"name": "any", "parameters": {"type": "object"}},
)


def tagged(name, **values):
    """A call as Qwen3-Coder writes it."""
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def verdict(family, grammar, text):
    """None for an answer that may be; else what of it is legal, with "..." where it is all but its end."""
    return verdict_of_form(family, structured_output(grammar=grammar), text)


def verdict_of_form(family, form, text):
    """The same for a form that may have a preamble."""
    state = family.compiler.compile(form).state()
    ids = family.tokenizer.encode(text, add_special=False)
    for count, token in enumerate(ids):
        if not state.permits((), token):
            return "".join(map(family.tokenizer.text_of, ids[:count]))
        state.commit([token])
    return None if state.permits((), 256) else text + "..."
