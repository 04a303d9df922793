"""Small tokenizers with small templates, one for each family of models that calls tools."""

from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specinfer.grammar.grammar import GrammarCompiler
from specinfer.serve.dialect.call_format import CallFormat
from specinfer.serve.fields.conversation import Function, read_tools
from specinfer.structured_output import structured_output
from specinfer.tokenizer import Tokenizer
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
{%- endfor %}]{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL_ARGS = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
MISTRAL_IDS = MISTRAL_ARGS.replace("[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]")
THINKING = """{% if false %}</think>{% endif %}{{ '<think>\n' if enable_thinking }}"""


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
    tokenizer: Tokenizer
    name: str = "auto"

    def __post_init__(self):
        self.format = CallFormat.of(self.tokenizer, self.name)
        self.compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size)


FAMILIES = {
    # In Qwen's vocabulary <tool_call> is one token, but text; other models spell it, or have it special.
    "qwen": Family(tokenizer(QWEN, text=("<tool_call>", "</tool_call>", "<think>", "</think>"))),
    "hermes": Family(tokenizer(QWEN)),
    "hermes, described": Family(tokenizer(PLAIN), "hermes"),
    "hermes, special": Family(
        tokenizer(QWEN, special=("<tool_call>", "</tool_call>", "<think>", "</think>"))
    ),
    "llama3": Family(tokenizer(LLAMA, special=("<|python_tag|>",))),
    "llama3, several": Family(tokenizer(LLAMA.replace("single tool-calls", "calls"))),  # and no tag
    "mistral": Family(tokenizer(MISTRAL, special=("[TOOL_CALLS]",))),
    "mistral, spelled": Family(tokenizer(MISTRAL)),
    "mistral_args": Family(tokenizer(MISTRAL_ARGS, special=("[TOOL_CALLS]", "[ARGS]"))),
    "mistral_ids": Family(tokenizer(MISTRAL_IDS, special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))),
}

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


def tools_of(*functions):
    """The tools that functions are, each described as requests do."""
    return read_tools([Function(**one) for one in functions])


TOOLS = tools_of(
    {"name": "get", "parameters": WEATHER, "description": "Weather."},
    {"name": "get_time"},
)


# As the model's own has it, less the words around it.
CODER_TEMPLATE = """\
{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endfor %}[assistant]"""
CODER = Family(tokenizer(CODER_TEMPLATE, text=("<tool_call>", "</tool_call>")))
SPECIAL_CODER = Family(tokenizer(CODER_TEMPLATE, special=("<tool_call>", "</tool_call>")))
TAGGED_SCHEMA = {
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
