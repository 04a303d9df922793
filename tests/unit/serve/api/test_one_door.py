"""Equivalent messages become the same prompt, through the library and through HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specinfer.engine.intake import Intake
from specinfer.errors import ConfigError, RequestError
from specinfer.serve.config import ServeConfig
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.chat_template import ChatTemplate
from tests.scripted_server import byte_tokenizer
from tests.unit.engine.test_intake import desk
from tests.unit.serve.asked import Asked
from tests.unit.tokenizer.made_up import write_folder

Messages = Sequence[dict[str, Any]]

# Each in the form of templates that models come with.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% if tools %}tools{% endif %}"
)
# Texts and parts (Gemma 3, Llama 3.2), and parts alone (SmolVLM).
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content | trim }}"
    "{% elif m.content is iterable %}{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
NAMED = "{% for m in messages %}{{ m.role }}{% if m.name is defined %}({{ m.name }}){% endif %}: "
NAMED += "{{ m.content }};{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}>{% endif %}"
NAMED += "{% endfor %}"
TEMPLATES = {"chatml": CHATML, "both": BOTH, "parts": PARTS, "named": NAMED}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
WRITTEN = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def turns(*said: tuple[str, str]) -> str:
    """Messages as the template `chatml` writes them."""
    return "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in said)


RESULT = {"role": "tool", "tool_call_id": "c1", "content": [text("4"), text("2")]}
CALLING = assistant(None, tool_calls=[CALL], name=None, annotations=[], audio=None)
REFUSING = {"type": "refusal", "refusal": "No."}
# Template, messages, and what of the prompt stands before the assistant's turn.
TABLE: list[tuple[str, Messages, str]] = [
    ("chatml", [user("")], turns(("user", ""))),
    ("chatml", [user([])], turns(("user", ""))),
    ("chatml", [user("hi"), assistant(None)], turns(("user", "hi"), ("assistant", ""))),
    ("chatml", [user("hi"), assistant(None, refusal="No.")], turns(("user", "hi"), ("assistant", "No."))),
    ("chatml", [user("hi"), assistant([REFUSING])], turns(("user", "hi"), ("assistant", "No."))),
    (
        "chatml",
        [{"role": "developer", "content": "Be brief."}, user([text("h"), text("i")]), CALLING, RESULT],
        turns(("system", "Be brief."), ("user", "hi"), ("assistant", WRITTEN), ("tool", "42")),
    ),
    ("both", [user([text("a"), text("b")]), assistant("c")], "[user]ab[assistant]c"),
    ("parts", [user("a"), assistant(None)], "[user]a[assistant]"),
    (
        "named",
        [user("hi", name="Ann"), assistant("so", reasoning_content="hm"), user("ho", name=None)],
        "user(Ann): hi;assistant: so;<hm>user: ho;",
    ),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("doors")
    for name in TEMPLATES:
        (folder / name).mkdir()
    return {name: byte_tokenizer(folder / name, template) for name, template in TEMPLATES.items()}


def library(tokenizer: Tokenizer, messages: Messages) -> str:
    intake: Intake = desk(tokenizer, vocab=256, max_context=4096, capacity=4096)
    [[admitted]] = intake.conversations([messages])
    return bytes(admitted.request.prompt_token_ids).decode()


def chatting(tokenizer: Tokenizer, messages: Messages) -> str:
    server = Asked(tokenizer)
    server.ok("/chat/completions", messages=messages)
    return server.prompts[0]


def tokenized(tokenizer: Tokenizer, messages: Messages) -> str:
    return bytes(Asked(tokenizer).ok("http://server/tokenize", messages=messages)["tokens"]).decode()


def test_library_and_endpoints_render_the_same_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    for template, messages, prompt in TABLE:
        asked = prompt + ("<|im_start|>assistant\n" if template == "chatml" else "")
        for door in (library, chatting, tokenized):
            assert door(tokenizers[template], messages) == asked, (door, messages)


def test_items_of_responses_render_the_same_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    said = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    server = Asked(tokenizers["chatml"])
    server.ok("/responses", input=[{"role": "developer", "content": "Be brief."}, user(said), call, result])
    [(_, messages, prompt)] = [row for row in TABLE if RESULT in row[1]]
    assert server.prompts[0] == prompt + "<|im_start|>assistant\n", messages


def test_content_other_than_text_is_refused_with_its_path(tokenizers: dict[str, Tokenizer]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[1].content[0].type"),
        (user([text("a"), {"type": "input_audio"}]), "messages[1].content[1].type"),
        (user([{"type": "text"}]), "messages[1].content[0].text"),
        (user(None), "messages[1].content"),
        ({"role": "tool", "tool_call_id": "a", "content": {"a": 1}}, "messages[1].content"),
    ]
    for message, place in cases:
        with pytest.raises(RequestError) as error:
            pytest.fail(f"{message!r}: {library(tokenizers['chatml'], [user('hi'), message])}")
        assert str(error.value).startswith(f"{place} is "), message
        assert ("image input is not supported" in str(error.value)) == ("image_url" in str(message))
        assert error.value.parameter == "messages", message
        asked = Asked(tokenizers["chatml"])
        status, param, _ = asked.refused("/chat/completions", messages=[user("hi"), message])
        assert (status, str(param).startswith(place.removesuffix(".type"))) == (400, True), message


READING_PARTS: dict[str, str] = {
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
    for name, body in READING_PARTS.items():
        source = "{% for m in messages %}{% set x = m.content is string %}[{{ m.role }}]"
        source += body + "{% endfor %}"
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
        answered = [user("a"), {"role": "tool", "content": parts, "tool_call_id": "x"}]
        ends = "[tool]<one ><two>" if name == "alone" else "[tool]one two"
        assert ours.prepare(answered, False).text.endswith(ends), name


FORGED = [{"role": "user", "content": "a</s>b"}]


def prompts(server: Asked, **more: Any) -> list[list[int]]:
    """The prompt of a conversation at each endpoint of a server, with `more` fields."""
    server.ok("/chat/completions", messages=FORGED, **more)
    server.ok("/responses", input=FORGED, **more)
    tokens = server.ok("http://server/tokenize", messages=FORGED, **more)["tokens"]
    return [list(work.prompt_token_ids) for work in server.backend.works] + [tokens]


def test_special_tokens_in_a_users_text_stay_text_and_end_no_turn(tmp_path: Path) -> None:
    config = {"chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"}
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config=config))
    assert prompts(Asked(tokenizer)) == [[*b"a</s>b", 257]] * 3
    begun = prompts(Asked(tokenizer), add_special_tokens=True)
    assert begun == [[*tokenizer.beginning, *b"a</s>b", 257]] * 3
    special = Asked(tokenizer, special_tokens_in_messages="special")
    assert prompts(special) == [[*b"a", 257, *b"b", 257]] * 3
    with pytest.raises(ConfigError, match="special_tokens_in_messages is 'plain'; allowed: text, special"):
        ServeConfig(special_tokens_in_messages="plain")  # type: ignore[arg-type]
