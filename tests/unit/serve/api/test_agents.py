"""Requests of coding agents, as they send them: Codex CLI, Claude Code and clients of chat completions."""

import logging
import time
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from specinfer.request import Delta, FinishReason
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import says
from tests.unit.serve.api.servers import prompt_tokens
from tests.unit.serve.asked import BODIES, HI, Asked, named_events
from tests.unit.serve.conftest import TEMPLATE  # noqa: F401 - `tokenizer` reads it

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"name": "shell", "description": "Runs a command.", "parameters": SCHEMA}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", **SHELL}]},
]
CODEX: dict[str, Any] = {
    "model": "gpt-5.1-codex",
    "instructions": "Be a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "g"},
        {"type": "message", "role": "assistant", "phase": "commentary", "content": "I look."},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "tools": [{"type": "function", "strict": False, **SHELL}, *HOSTED],
    **{"tool_choice": "auto", "parallel_tool_calls": True, "store": False, "stream": True},
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    **{"prompt_cache_key": "0199-aa", "service_tier": "priority", "truncation": "auto"},
    **{"text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "1"}},
    "stream_options": {"include_obfuscation": False},
}
LINE = "x-anthropic-billing-header: cc_version=2.1.{0}.abc; cc_entrypoint=cli; cch={0}f3b;"
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "unsigned"}
CALLING = {"type": "tool_use", "id": "t1", "name": "shell", "input": {}, "caller": {"type": "direct"}}
CALLED = {"name": "shell", "description": "Runs a command.", "input_schema": SCHEMA}
CALLED |= {"eager_input_streaming": True, "defer_loading": True, "allowed_callers": ["direct"]}


def text_of(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-opus-5",
    "max_tokens": 32000,
    "system": [text_of(LINE.format(15)), text_of("You are an agent.") | EPHEMERAL],
    "messages": [
        {"role": "user", "content": [text_of("List files") | EPHEMERAL]},
        {"role": "assistant", "content": [THOUGHT, CALLING]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.py"}]},
    ],
    "tools": [CALLED, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    **{"output_config": {"effort": "medium"}, "metadata": {"user_id": "u"}, "speed": "fast"},
    "diagnostics": {"previous_message_id": "m"},
}


def post(
    tokenizer: Tokenizer, path: str, *bodies: Any, text: str = "Done", **options: Any
) -> tuple[list[httpx.Response], list[str]]:
    """Send the bodies one after another; returns the answers, and the prompts that the engine got."""
    server = Asked(tokenizer, says(text), **options)
    return [server.http.post(path, json=body) for body in bodies], server.prompts


def test_codex_gets_its_functions_alone(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specinfer"):
        # The effort opens the reasoning of the template.
        answers, prompts = post(tokenizer, "/responses", CODEX, CODEX, text="Hm</think>Done")
    for answer in answers:
        assert answer.status_code == 200, answer.text
        last = named_events(answer)[-1]
        response = Response.model_validate(last["response"])
        assert (response.model, response.output_text) == ("scripted", "Done")
        assert [tool.type for tool in response.tools] == ["function"]
        assert response.text.verbosity == "low"
    assert prompts[0] == prompts[1]
    assert '"name": "shell"' in prompts[0]
    assert "apply_patch" not in prompts[0]
    assert "mcp__files" not in prompts[0]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines))
    for kind in ("web_search", "local_shell", "custom", "namespace"):
        assert f"tools of type {kind!r} are left out: this server has only functions" in lines
    ignored = ("phase", "context", "include_obfuscation", "client_metadata", "service_tier")
    unknown = {f"the unknown field {name!r} is ignored" for name in ignored}
    assert {line for line in lines if "unknown" in line} == unknown  # none of a tool that is left out
    assert "scripted answers requests for the model 'gpt-5.1-codex'" in lines


def test_a_choice_of_a_tool_that_is_left_out_is_refused(tokenizer: Tokenizer) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    chat = [{"type": "function", "function": SHELL}, {"type": "custom", "custom": {"name": "patch"}}]
    for path, body, word in (
        ("/responses", {"input": "Hi", "tools": HOSTED, "tool_choice": {"type": "web_search"}}, "web_search"),
        ("/responses", {"input": "Hi", "tools": HOSTED, "tool_choice": "required"}, "needs functions"),
        ("/chat/completions", {"messages": HI, "tools": chat, "tool_choice": {"type": "custom"}}, "custom"),
        ("/messages", {"tools": [hosted], "tool_choice": {"type": "tool", "name": "web_search"}}, "needs"),
        ("/messages", {"tools": [hosted], "tool_choice": {"type": "any"}}, "web_search_20250305"),
    ):
        if path == "/messages":
            body = {"messages": HI, "max_tokens": 5, **body}
        [answer], prompts = post(tokenizer, path, body)
        assert (answer.status_code, prompts) == (400, []), body
        message = answer.json()["error"]["message"]
        assert "tool_choice" in message
        assert word in message
    [answer], [prompt] = post(tokenizer, "/chat/completions", {"messages": HI, "tools": chat})
    assert answer.status_code == 200
    assert "shell" in prompt
    assert "patch" not in prompt


def test_claude_codes_accounting_line_is_no_part_of_the_prompt(tokenizer: Tokenizer) -> None:
    later = CLAUDE_CODE | {"system": [text_of(LINE.format(99)), CLAUDE_CODE["system"][1]]}
    without = CLAUDE_CODE | {"system": CLAUDE_CODE["system"][1:]}
    answers, prompts = post(tokenizer, "/messages", CLAUDE_CODE, later, without)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "scripted"
    assert len(set(prompts)) == 1
    assert "<system>You are an agent.<user>List files" in prompts[0]
    long = CLAUDE_CODE | {"system": [text_of("x-" + "a-" * 50_000 + " " * 50_000 + "b")]}
    began = time.monotonic()
    post(tokenizer, "/messages", long)
    assert time.monotonic() - began < 5, "a line that is only like it is read once"
    alone = CLAUDE_CODE | {"system": CLAUDE_CODE["system"][:1]}
    _, [prompt] = post(tokenizer, "/messages", alone)
    assert "<system>" not in prompt
    for text in ("See x-anthropic-billing-header: a", f"{LINE}\nBe brief.", "x-billing: a"):
        _, [prompt] = post(tokenizer, "/messages", CLAUDE_CODE | {"system": [text_of(text)]})
        assert text in prompt, "only a whole line of that kind is left out"


def test_the_start_of_a_message_never_knows_its_end(tokenizer: Tokenizer) -> None:
    server = Asked(tokenizer, says("Done", reason=FinishReason.STOP, stopped_by="x"))
    events = named_events(server.http.post("/messages", json=CLAUDE_CODE | {"stream": True}))
    start, end = events[0]["message"], events[-2]
    assert (start["stop_reason"], start["stop_sequence"], start["usage"]["output_tokens"]) == (None, None, 0)
    assert prompt_tokens(start["usage"]) == len(server.prompts[0])
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "x"}
    assert end["usage"]["output_tokens"] == 4


def test_tokens_are_counted_beforehand_as_usage_counts_them(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": SHELL}]
    bodies: list[dict[str, Any]] = [
        {"messages": HI},
        {"messages": HI, "tools": tools},
        {"messages": HI, "tools": tools, "tool_choice": "none"},
        {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": HI, "enable_thinking": True},
        {"messages": HI, "reasoning_effort": "high"},
        {"messages": HI, "reasoning_effort": "none", "temperature": 0, "odd": 1},
        {"messages": [*HI, {"role": "assistant", "content": "It"}], "continue_final_message": True},
        {"messages": HI, "add_generation_prompt": False},
    ]
    counted, _ = post(tokenizer, "http://server/tokenize", *bodies)
    made, prompts = post(tokenizer, "/chat/completions", *bodies)
    for body, count, answer, prompt in zip(bodies, counted, made, prompts, strict=True):
        assert count.json()["count"] == answer.json()["usage"]["prompt_tokens"] == len(prompt), body
        assert bytes(count.json()["tokens"]).decode() == prompt, body
    assert len(set(prompts)) == 5
    plain = {"messages": HI, "system": "s"}
    messages = [plain, CLAUDE_CODE, plain | {"thinking": {"type": "enabled", "budget_tokens": 8}}]
    counted, _ = post(tokenizer, "/messages/count_tokens", *messages)
    made, _ = post(tokenizer, "/messages", *({"max_tokens": 9, **body} for body in messages))
    for one, other in zip(counted, made, strict=True):
        assert one.json()["input_tokens"] == prompt_tokens(other.json()["usage"])
    texts = ({"prompt": ""}, {"prompt": "ab"}, {"prompt": "a", "tools": tools})
    [empty, text, wrong], _ = post(tokenizer, "http://server/tokenize", *texts)
    assert (empty.json()["count"], text.json()["count"], wrong.status_code) == (0, 2, 400)


def test_seeds_are_integers_of_64_bits_in_every_api(tokenizer: Tokenizer) -> None:
    server = Asked(tokenizer)
    for path, body in BODIES.items():
        for seed in (0, -2, -(2**63), 2**63, 2**64 - 1):
            server.ok(path, **body | {"seed": seed})
            assert server.backend.works[-1].params.seed == seed
        for seed in (2**64, -(2**63) - 1):
            answer = server.http.post(path, json=body | {"seed": seed})
            assert (answer.status_code, "seed" in answer.text) == (400, True)


def test_a_fault_of_the_grammar_of_tools_names_the_tools(tokenizer: Tokenizer) -> None:
    refused = Delta("", finish_reason=FinishReason.ERROR, error="no such keyword", parameter="grammar")
    server = Asked(tokenizer, [refused])
    for path, body in (
        ("/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": SHELL}]}),
        ("/responses", {"input": "Hi", "tools": [{"type": "function", **SHELL}]}),
    ):
        answer = server.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), path
