"""Fields of POST /v1/messages, and refusals that name their path."""

from __future__ import annotations

from typing import Any

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import says
from tests.unit.serve.api.messages_server import HI, MessagesServer

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
IMAGE_TYPE = str({"type": "image"})[1:-1]
USE = {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}
TIME = {"name": "time", "input_schema": {"type": "object"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"tools": []},
    {"tool_choice": {"type": "auto"}},
    {"tool_choice": {"type": "none"}, "tools": [TIME]},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive"}},
    {"thinking": {"type": "enabled", "budget_tokens": 4}},  # the model does not reason
    {"stop_sequences": []},
    {"stop_sequences": [""]},
    {"speed": "fast", "inference_geo": "us", "service_tier": "standard_only"},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"mcp_servers": []},
    {"n": 1},
    {"output_config": {}},
    {"stream_options": {"include_usage": False}, "stream": True},  # the usage comes in any case
    {"output_config": {"effort": "low"}},
    {"reasoning_effort": "low"},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
]


def test_fields_without_effect_are_accepted(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    usual = {"max_tokens": 5, "messages": HI}
    for body in WITHOUT_EFFECT:
        answer = server.http.post("/messages?beta=true", json=usual | body, headers=headers)
        assert answer.status_code == 200, (body, answer.text)
        assert server.prompts[-1] == "user: Hi\nassistant: ", body


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"context_management": {"edits": 5}}, "context_management"),
    ({"messages": []}, "messages"),
    ({"messages": [user(IMAGE)]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [user(USE)]}, "messages[0].content[0]"),
    ({"messages": [assistant(RESULT)]}, "messages[0].content[0]"),
    ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id"),
    (
        {"messages": [assistant(USE), user(RESULT | {"content": [IMAGE]})]},
        "messages[1].content[0].content[0]",
    ),
    ({"messages": [*HI, assistant(USE)]}, "messages"),
    ({"messages": [*HI, assistant({"type": "thinking", "thinking": "Hm"})]}, "messages"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{"name": "time"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [TIME]}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "name": "time"}, "tools": [TIME]}, "tool_choice"),
    ({"tools": [TIME]}, "tools"),  # the template has no calls
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"stop": "x", "stop_sequences": ["y"]}, "stop"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"guided_json": {"type": "object"}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"trace": True}, "trace"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "regex"),
]


def test_unsupported_values_are_refused_with_their_path(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    for body, place in REFUSED:
        status, kind, message = server.refusal(**body)
        assert (status, kind) == (400, "invalid_request_error"), body
        assert place in message, body
        assert ("image input is not supported by this server" in message) == (IMAGE_TYPE in str(body)), body
    assert server.backend.works == []
