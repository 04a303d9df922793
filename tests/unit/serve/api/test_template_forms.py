"""An agent's conversation through templates of common families, by library and by HTTP.

Messages of clients (null content, parts, arguments as text, foreign call ids) must be rendered like the
normalized messages in transformers: texts, objects, fitting ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specinfer.tokenizer.chat_template import ChatTemplate, MessageStyle, messages_for_template
from tests.scripted_server import byte_tokenizer
from tests.unit.serve.api.test_one_door import chatting, library, text, tokenized, user

# The last question is looked for from the end, and thoughts before it are left out (Qwen3).
BACKWARDS = """\
{% set n = namespace(last=none) %}
{% for m in messages[::-1] %}
{% if n.last is none and m.role == 'user' and m.content is string and not m.content.startswith('<r>') %}
{% set n.last = messages | length - 1 - loop.index0 %}
{% endif %}
{% endfor %}
{% for m in messages %}{% set said = m.content if m.content is string else '' %}
{% if m.role == 'assistant' and '</think>' in said %}
{% set said = said.split('</think>')[-1].lstrip('\\n') if loop.index0 < n.last else said %}
{% endif %}
{{ '<' + m.role + '>' + said }}{% for c in m.tool_calls or [] %}{{ '\\n' if said or not loop.first }}
{{ c.function.name }}
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}
{% endfor %}{{ tools | length if tools }}"""
# One call in a message, and results as JSON, whatever they are (Llama 3).
SINGLE = """\
{% if messages[0].role == 'system' %}{% set first = messages[0]['content'] | trim %}
{% set messages = messages[1:] %}
{{ '<system>' + first }}{% endif %}
{% for m in messages %}
{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}
{{ raise_exception('single tool-calls, please') }}{% endif %}
{{ '<assistant>' + m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}
{% elif m.role == 'tool' %}<ipython>{{ m.content | tojson if m.content is iterable else m.content }}
{% else %}{{ '<' + m.role + '>' + m.content | trim }}{% endif %}
{% endfor %}{{ tools | length if tools }}"""
# Turns that alternate, and ids of nine characters at calls and results (Mistral).
NINE = """\
{% set n = namespace(turn=0) %}{% set rest = messages[1:] if messages[0].role == 'system' else messages %}
{% for m in rest if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{% if (m.role == 'user') != (n.turn % 2 == 0) %}{{ raise_exception('turns alternate') }}{% endif %}
{% set n.turn = n.turn + 1 %}
{% endfor %}
{% for m in rest %}
{% if m.role == 'user' %}[{{ messages[0].content + '; '
   if loop.last and messages | length > rest | length }}{{ m.content }}]
{% elif m.tool_calls is defined %}{% for c in m.tool_calls %}{% set call = c.function | tojson %}
{{ call[:-1] }}
{% if not c.id is defined or c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
{{ ', ' + c.id + '}' }}
{% endfor %}
{% elif m.role == 'tool' %}{% set result = m.content.content if m.content.content is defined else m.content %}
{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{ raise_exception('nine characters') }}{% endif %}
{{ m.tool_call_id + '=' + result | string }}
{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}
{% endfor %}{{ tools | length if tools }}"""
FORMS = {
    "backwards": (BACKWARDS, MessageStyle()),
    "single": (SINGLE, MessageStyle(single_calls=True)),
    "nine": (NINE, MessageStyle(id_length=9)),
}


def call(name: str, call_id: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": '{"city": "\u00d6slo"}'},
    }


AGENT: list[dict[str, Any]] = [
    {"role": "developer", "content": [text("Be brief.")]},
    user([text("Rain "), text("or snow?")]),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("rain", "call_AbCdEfGhIjKl"), call("snow", "call_MnOpQrStUvWx")],
        "refusal": None,
    },
    {"role": "tool", "tool_call_id": "call_AbCdEfGhIjKl", "content": [text("no"), text("ne")]},
    {"role": "tool", "tool_call_id": "call_MnOpQrStUvWx", "content": "3 cm"},
    {"role": "assistant", "content": [text("Snow.")], "annotations": []},
    user("How deep?", name=None),
]


@pytest.mark.parametrize("form", FORMS)
def test_client_messages_render_like_normalized_ones_in_transformers(form: str, tmp_path: Path) -> None:
    template, style = FORMS[form]
    tokenizer = byte_tokenizer(tmp_path, template)
    ready = messages_for_template(AGENT, style)
    assert all(isinstance(message["content"], str) for message in ready)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    expected = theirs.apply_chat_template(ready, chat_template=template, tokenize=False)
    for door in (library, chatting, tokenized):
        assert door(tokenizer, AGENT) == expected, door
    for wrong in ("None", "'type'", "call_"):
        assert wrong not in expected
    for said in ("Be brief.", "Rain or snow?", "none", "3 cm", "Snow.", "How deep?", "\u00d6slo"):
        assert said in expected


PARTS: dict[str, str] = {
    "either": "{{ m.content if x }}{% for p in m.content if not x %}({{ p.text }}){% endfor %}",
    "slices": "{{ m.content if x else m.content[0].text ~ '+' ~ m.content[1:] | length }}",
    "joined": "{{ m.content if x else m.content | map(attribute='text') | join('; ') }}",
    "picked": "{{ m.content if x else (m.content | selectattr('type') | list | last).text }}",
    "alone": "{% for p in m.content %}<{{ p['text'] }}>{% endfor %}",
    "text": "{{ m.content | trim }}",
    "sliced text": "{{ m.content[:99] }}",
    "user's": "{{ m.content[-1].text if m.role == 'user' and not x else m.content }}",
}


def test_parts_are_handed_over_where_a_template_reads_them(tmp_path: Path) -> None:
    library = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(tmp_path).backend)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for name, body in PARTS.items():
        source = (
            "{% for m in messages %}{% set x = m.content is string %}[{{ m.role }}]" + body + "{% endfor %}"
        )
        ours = ChatTemplate(source, {})
        for role in ("system", "user", "assistant"):
            given: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": role, "content": parts}]
            if name == "alone":
                given[0]["content"] = [{"type": "text", "text": "a"}]
            theirs = library.apply_chat_template(given, chat_template=source, tokenize=False)
            found = ours.prepare(given, False).text
            if "'type'" in theirs:  # it prints the list, which no template's author meant
                given[1]["content"] = "one two"
                theirs = library.apply_chat_template(given, chat_template=source, tokenize=False)
            assert found == theirs, (name, role)
        result = ours.prepare(
            [user("a"), {"role": "tool", "content": parts, "tool_call_id": "x"}], False
        ).text
        assert result.endswith("[tool]<one ><two>" if name == "alone" else "[tool]one two"), name
