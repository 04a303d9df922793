"""Preparation of conversations before the engine gets them, and the threads that do it."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specinfer.request import Delta, FinishReason
from specinfer.serve.api import chat_prompt
from specinfer.tokenizer import ChatEncoder, Tokenizer
from tests.scripted_server import FACTS, byte_tokenizer, says
from tests.unit.serve.asked import BODIES, HI, Asked, chunks

# It opens the reasoning, and writes calls as Hermes does.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson(indent=1) }}}'
    "</tool_call>{% endfor %}{% endfor %}<think>\n{% if closed %}</think>{% endif %}"
)


def ask(server: Asked, **body: Any) -> dict[str, Any]:
    """The answer to a conversation."""
    answer = server.http.post("/chat/completions", json={"messages": HI} | body)
    return {**answer.json(), "status": answer.status_code}


def test_an_answer_that_has_a_form_has_it_behind_the_reasoning(tokenizer: Tokenizer) -> None:
    cases: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"regex": r"\{.*\}"},
        {"choice": ['{"a": 1}']},
        {"grammar": 'start: "{" /.*/ "}"'},
    ]
    for form in cases:
        server = Asked(tokenizer, says('\nhm\n</think>\n\n{"a": 1}'))
        message = ask(server, **form)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 1}'), form
        preamble = server.backend.works[0].params.structured_output.preamble
        assert preamble.startswith("preamble: close gap?"), form


def test_reasoning_is_bounded_by_the_request_its_effort_or_the_server(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, 300),
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_token_budget": -1}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}, "reasoning_effort": "low"}, 0),
        ({"reasoning": {"max_tokens": 5}, "max_tokens": 6}, 5),
        ({"reasoning_budget": 5, "tools": [{"type": "function", "function": {"name": "f"}}]}, 5),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "high"}, 300),
        ({"chat_template_kwargs": {"closed": True}, "thinking_token_budget": 7}, None),
        ({"regex": "[a-z]{10}</think>x"}, None),  # the form has the reasoning in it
    ]
    for body, tokens in cases:
        server = Asked(tokenizer, says("hm</think>Yes."), reasoning_budget=300)
        assert ask(server, **body)["status"] == 200, body
        bound = server.backend.works[0].params.thinking
        assert (bound and bound.tokens) == tokens, body
        if bound is not None:
            assert (bound.started, bound.ending) == (True, tuple(b"</think>")), body
    for most in ({"max_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 7}):
        answer = ask(Asked(tokenizer, says("hm")), thinking_token_budget=7, **most)
        assert (answer["status"], answer["error"]["param"]) == (400, "thinking_token_budget")
    answer = ask(Asked(tokenizer), regex="[a-z]{10}</think>x", thinking_token_budget=3)
    assert (answer["status"], answer["error"]["param"]) == (400, "thinking_token_budget")


def test_every_api_counts_the_tokens_of_reasoning(tokenizer: Tokenizer) -> None:
    texts = says("h", "m</thi", "nk>Yes.", "No"), says("It never ends", reason=FinishReason.LENGTH)
    cases = [
        ("/messages", {}, 1, "output_tokens_details", "thinking_tokens"),
        ("/responses", {}, 1, "output_tokens_details", "reasoning_tokens"),
        ("/chat/completions", {}, 1, "completion_tokens_details", "reasoning_tokens"),
        ("/chat/completions", {"n": 2}, 2, "completion_tokens_details", "reasoning_tokens"),
    ]
    for path, more, answers, details, name in cases:
        for first, size in zip(texts, (len("hm</think>"), len("It never ends")), strict=True):
            body = BODIES[path] | more
            whole = Asked(tokenizer, first, first).ok(path, **body)["usage"]
            assert whole[details][name] == answers * size, (path, more)
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            stream = Asked(tokenizer, first, first).http.post(path, json=body | streaming)
            ends = [one.get("response", one).get("usage") for one in chunks(stream)]
            assert [one for one in ends if one][-1][details] == whole[details], (path, more)


def test_a_hidden_token_is_no_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "is_special", lambda _, token: token == 0)
    script = [Delta("", "hm</th", tuple(b"hm</th\0")), *says("ink>Yes")]
    usage = Asked(tokenizer, script).ok("/chat/completions", **BODIES["/chat/completions"])["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("hm</th?ink>")


def test_a_budget_without_reasoning_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Asked(byte_tokenizer(tmp_path, "{{ messages[0].content }}"))
    for budget in (-1, 7, 8):
        assert ask(server, thinking_token_budget=budget)["status"] == 200
    assert caplog.text.count("the budget of thinking has no effect: the model does not reason") == 1


def test_reasoning_that_the_template_closed_is_not_reopened(tokenizer: Tokenizer) -> None:
    server = Asked(tokenizer, says('{"a": 1}'))
    closed = {"chat_template_kwargs": {"closed": True}}
    message = ask(server, response_format={"type": "json_object"}, **closed)["choices"][0]["message"]
    assert (message["content"], "reasoning_content" in message) == ('{"a": 1}', False)
    assert server.backend.works[0].params.preamble is None


def test_schemas_are_read_in_other_threads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    where: dict[str, int] = {}

    def watched(work: str, real: Any, *given: Any, **more: Any) -> Any:
        where[work] = threading.get_ident()
        return real(*given, **more)

    for work in ("read_tools", "call_grammar", "for_template"):
        monkeypatch.setattr(chat_prompt, work, partial(watched, work, getattr(chat_prompt, work)))
    assert ask(Asked(tokenizer), tools=[{"type": "function", "function": {"name": "f"}}])["status"] == 200
    assert len(where) == 3
    assert threading.get_ident() not in where.values()


def test_what_cannot_fit_is_refused_unrendered(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any, **more: Any) -> Any:
        raise AssertionError("it was looked at")

    monkeypatch.setattr(chat_prompt, "read_tools", never)
    monkeypatch.setattr(ChatEncoder, "render", never)
    large = "x" * (64 * FACTS.max_length)
    for param, value in {
        "messages": [{"role": "user", "content": large}],
        "tools": [{"type": "function", "function": {"name": "f", "description": large}}],
        "chat_template_kwargs": {"closed": large},
    }.items():
        error = ask(Asked(tokenizer), **{param: value})["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_arguments_that_nest_too_deep_for_the_template_are_the_callers_fault(tokenizer: Tokenizer) -> None:
    deep = '{"a": ' * 500 + "1" + "}" * 500
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    answer = ask(Asked(tokenizer), messages=[*HI, {"role": "assistant", "tool_calls": [call]}])
    assert (answer["status"], answer["error"]["param"]) == (400, "messages")
