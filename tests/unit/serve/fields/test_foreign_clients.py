"""Requests of other servers' clients over HTTP, without a model."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import FACTS, Script, byte_tokenizer, says, says_in_steps
from tests.unit.serve.asked import HI, Asked, chunks

PREFILLED = [*HI, {"role": "assistant", "content": "It is "}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
PLAIN = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
SWITCH = PLAIN.removesuffix("{% endif %}") + "{% if not NAME %}<think></think>{% endif %}{% endif %}"
TEMPLATES = {
    "plain": PLAIN,
    "documents": "{% for one in documents or () %}[{{ one.title }}: {{ one.n }}]{% endfor %}" + PLAIN,
    "switch": SWITCH.replace("NAME", "enable_thinking"),
    "other switch": SWITCH.replace("NAME", "thinking"),
    "effort": "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "always": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = tmp_path_factory.mktemp
    return {name: byte_tokenizer(made("template"), template) for name, template in TEMPLATES.items()}


class Sent:
    """An answer, and the work that the engine got."""

    def __init__(self, tokenizer: Tokenizer, path: str, body: Any, script: Script = ()) -> None:
        server = Asked(tokenizer, script or says("ok"))
        answer = server.http.post(path, json=body)
        self.status, self.text, self.chunks = answer.status_code, answer.text, chunks(answer)
        self.works, self._prompts = server.backend.works, server.prompts

    @property
    def prompt(self) -> str:
        assert self.status == 200, self.text
        return self._prompts[0]

    @property
    def param(self) -> str:
        assert self.status == 400, self.text
        assert self.works == []
        return str(json.loads(self.text)["error"]["param"])


def chat(tokenizer: Tokenizer, script: Script = (), **body: Any) -> Sent:
    return Sent(tokenizer, "/chat/completions", {"messages": HI, **body}, script)


THINKS, DOES_NOT = "<user>Hi</user><assistant>", "<user>Hi</user><assistant><think></think>"


SWITCHED: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_effort": "none"}, DOES_NOT),
    ({"reasoning_effort": "medium"}, THINKS),
    ({"enable_thinking": True}, THINKS),
    ({"enable_thinking": False}, DOES_NOT),
    ({"chat_template_kwargs": {"enable_thinking": None}}, DOES_NOT),
    ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, DOES_NOT),
]


def test_a_template_with_a_switch(tokenizers: dict[str, Tokenizer]) -> None:
    for template, (body, prompt) in product(("switch", "other switch"), SWITCHED):
        assert chat(tokenizers[template], **body).prompt == prompt, (template, body)


def test_a_template_with_efforts_gets_them_unchanged(tokenizers: dict[str, Tokenizer]) -> None:
    assert chat(tokenizers["effort"], reasoning_effort="xhigh").prompt == "xhighHi"
    body = {"input": "Hi", "reasoning_effort": "minimal"}
    assert Sent(tokenizers["effort"], "/responses", body).prompt == "minimalHi"


def test_an_effort_that_the_template_lacks_has_no_effect(tokenizers: dict[str, Tokenizer]) -> None:
    for template, reasons in (("plain", False), ("always", True)):
        tokenizer = tokenizers[template]
        plain = chat(tokenizer).prompt
        for effort in ("none", "minimal", "medium", "xhigh"):
            assert chat(tokenizer, reasoning_effort=effort).prompt == plain
        assert chat(tokenizer, enable_thinking=reasons).prompt == plain
        assert chat(tokenizer, enable_thinking=not reasons).param == "chat_template_kwargs"
        assert chat(tokenizer, chat_template_kwargs={"odd": 1}).param == "chat_template_kwargs"
        assert chat(tokenizer, chat_template_kwargs={"odd": None}).prompt == plain


def test_documents_go_to_the_template(tokenizers: dict[str, Tokenizer]) -> None:
    """Either field takes them unchanged; a template without them names the variable."""
    plain, given = chat(tokenizers["plain"]).prompt, [{"title": "A", "n": 1.0}, {"title": "B", "n": None}]
    shown = f"[A: 1.0][B: None]{plain}"
    assert chat(tokenizers["documents"], documents=given).prompt == shown
    assert chat(tokenizers["documents"], chat_template_kwargs={"documents": given}).prompt == shown
    for template in ("documents", "plain"):
        assert chat(tokenizers[template], documents=[]).prompt == plain
    assert chat(tokenizers["plain"], documents=given).param == "chat_template_kwargs"


def test_a_prefilled_message_is_continued(tokenizers: dict[str, Tokenizer]) -> None:
    plain = tokenizers["plain"]
    prefilled = chat(plain, messages=PREFILLED, continue_final_message=True)
    assert prefilled.prompt == "<user>Hi</user><assistant>It is "  # with the blank at its end
    both = chat(plain, messages=PREFILLED, continue_final_message=True, add_generation_prompt=False)
    assert both.prompt == prefilled.prompt
    assert json.loads(prefilled.text)["choices"][0]["message"]["content"] == "ok"
    closed = chat(plain, messages=PREFILLED, add_generation_prompt=False)
    assert closed.prompt == "<user>Hi</user><assistant>It is </assistant>"
    for name in ("prefix", "partial"):
        sent = chat(plain, messages=[*HI, PREFILLED[-1] | {name: True}])
        assert sent.prompt == prefilled.prompt
        new = chat(plain, messages=[*HI, PREFILLED[-1] | {name: False}])
        assert new.prompt.endswith("</assistant><assistant>")
    items = {"input": PREFILLED, "continue_final_message": True}
    assert Sent(plain, "/responses", items).prompt == prefilled.prompt
    counted = Sent(plain, "http://server/tokenize", {"messages": PREFILLED, "continue_final_message": True})
    assert bytes(json.loads(counted.text)["tokens"]).decode() == prefilled.prompt
    assert chat(plain, messages=PREFILLED, add_special_tokens=True).status == 200


def test_messages_that_cannot_be_continued_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    plain, calls = tokenizers["plain"], [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    for tokenizer, messages in (
        (plain, [*HI, {"role": "assistant", "content": "a", "tool_calls": calls}]),
        (tokenizers["twice"], PREFILLED),
    ):
        sent = chat(tokenizer, messages=messages, continue_final_message=True)
        assert sent.param == "continue_final_message"


def test_prefilled_reasoning_is_separated_from_the_answer(tokenizers: dict[str, Tokenizer]) -> None:
    for prefilled, reasoning, content in (
        ("<think>So far", " more", "done"),
        ("<think>So</think>Yes: ", None, " more</think>done"),
        ("", "a", "b"),
    ):
        script = says("<think>a</think>b") if not prefilled else says(" more</think>", "done")
        messages = [*HI, {"role": "assistant", "content": prefilled}]
        sent = chat(tokenizers["switch"], script, messages=messages, continue_final_message=True)
        assert sent.prompt == f"<user>Hi</user><assistant>{prefilled}"
        message = json.loads(sent.text)["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


OPENAIS = [("/chat/completions", {"messages": HI}), ("/completions", {"prompt": "a"})]


def test_chunks_may_have_the_usage_so_far(tokenizers: dict[str, Tokenizer]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usual = options | {"continuous_usage_stats": False}
    for path, asks in OPENAIS:

        def sent(**more: Any) -> Sent:
            return Sent(tokenizers["plain"], path, {**asks, **more}, says("a", "bc"))  # noqa: B023

        chunks = sent(stream=True, stream_options=options).chunks
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 3]
        chunks = sent(stream=True, stream_options=usual).chunks
        assert [bool(chunk["usage"]) for chunk in chunks] == [False, False, True]
        whole = sent(stream=False, stream_options=options)
        assert json.loads(whole.text)["usage"]["completion_tokens"] == 3


def test_figures_of_each_step_come_with_the_trace(tokenizers: dict[str, Tokenizer]) -> None:
    script: Sequence[Any] = says_in_steps("one two three four five six seven eight")
    for (path, asks), traced in product(OPENAIS, (False, True)):
        sent = Sent(tokenizers["plain"], path, {**asks, "trace": traced}, script)
        figures = json.loads(sent.text)["metrics"]["speculative_decoding"]
        assert ("per_step_accepted" in figures, "per_step_drafted" in figures) == (traced, traced), path
        if traced:
            assert sum(figures["per_step_accepted"]) == figures["num_accepted_draft_tokens"], path
            assert len(figures["per_step_drafted"]) == figures["num_spec_steps"] > 1, path


def test_lengths(tokenizers: dict[str, Tokenizer]) -> None:
    def max_tokens_of(path: str, **body: Any) -> int:
        work = Sent(tokenizers["plain"], path, body).works[0]
        assert len(work.prompt_token_ids) + work.params.max_tokens <= FACTS.max_length
        return work.params.max_tokens

    assert max_tokens_of("/completions", prompt="a") == 16
    assert max_tokens_of("/completions", prompt="a", max_tokens=-1) == FACTS.max_length - 1
    assert max_tokens_of("/completions", prompt="a", max_tokens=0) == 0
    assert max_tokens_of("/chat/completions", messages=HI, max_tokens=-1) == FACTS.max_length - len(THINKS)
    assert max_tokens_of("/responses", input="Hi", max_tokens=7) == 7


def test_the_begin_of_text_token_may_be_left_out(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    seen: list[bool] = []
    encode = tokenizer.encode

    def spied(text: str, *, add_special: bool = True) -> list[int]:
        seen.append(add_special)
        return encode(text, add_special=add_special)

    tokenizer.encode = spied  # type: ignore[method-assign]
    for path, asks in reversed(OPENAIS):
        for given in (None, True, False):
            assert Sent(tokenizer, path, {**asks, "add_special_tokens": given}).status == 200
    # A conversation that gets it is encoded without, behind the token that a text would begin with.
    assert seen == [True, True, False, False, True, False, False]


DUCKS = "🦆" * 100_000
OBJECTS = ("speculation", "logit_bias", "chat_template_kwargs", "structured_outputs")
CHATS: list[dict[str, Any]] = [
    *({name: {DUCKS: 1}} for name in OBJECTS),
    *({"speculation": {"verifier": DUCKS}}, {"logit_bias": [[DUCKS, 1]]}),
    *({name: DUCKS} for name in ("logprobs_mode", "temperature")),
    *({name: int("9" * 4000)} for name in ("seed", "mirostat")),
]
LONG: list[tuple[str, dict[str, Any]]] = [
    *(("/chat/completions", {"messages": HI, **body}) for body in CHATS),
    ("/responses", {"input": "a", "previous_response_id": DUCKS}),
    ("/responses", {"input": "a", "text": {"format": {"type": DUCKS}}}),
    ("/responses", {"input": [{"type": DUCKS}]}),
    ("/responses", {"input": [{"type": "function_call_output", "call_id": DUCKS, "output": ""}]}),
    ("http://server/%F0%9F%A6%86" + "a" * 5000, {}),
    ("/responses", {"input": "a", "tool_choice": {"type": DUCKS}}),
]


def test_errors_quote_little_of_the_request(tokenizers: dict[str, Tokenizer]) -> None:
    for path, body in LONG:
        sent = Sent(tokenizers["plain"], path, body)
        assert sent.status in (400, 404)
        assert len(sent.text) < 20_000  # a character may take twelve bytes
        error = json.loads(sent.text)["error"]
        assert len(error["message"]) <= 1003
        assert len(error["param"] or "") <= 103
