"""Templates that read parts of a message get parts, and others texts, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from specinfer.tokenizer.chat_template import ChatTemplate
from tests.scripted_server import byte_tokenizer
from tests.unit.serve.api.test_one_door import user

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
