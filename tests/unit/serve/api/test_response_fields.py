"""Fields of POST /v1/responses, and refusals that name them."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response

from specinfer.request import Delta, FinishReason
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import says
from tests.unit.serve.api.responses_server import ResponsesServer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({}, "input"),
    ({"input": [{"id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
    ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, "input[0].content[0].type"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"n": 2}, "n"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"trace": True}, "trace"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
]


def test_unsupported_values_are_refused_by_name(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer)
    for body, param in REFUSED:
        whole = {"input": "Hi"} | body if body else {}
        status, named, message = server.refusal(**whole)
        assert (status, named) == (400, param), body
        assert "response_format.json" not in message
        assert ("image input is not supported by this server" in message) == ("input_image" in str(body))
    assert server.backend.works == []


def test_values_without_effect_are_accepted(tokenizer: Tokenizer) -> None:
    nothing: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "background": False,
        "reasoning": {"effort": "low", "summary": "detailed"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "auto",
        "service_tier": "flex",
        "n": 1,
        "trace": False,
        "user": "u",
        "prompt_cache_key": "k",
        "top_logprobs": 0,
        "include": ["web_search_call.results"],
        "max_tool_calls": 2,
        "conversation": None,
    }
    server = ResponsesServer(tokenizer, says("a"))
    answer = server.http.post("/responses", json=nothing | {"input": "Hi"})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    assert server.backend.works[0].params.structured_output is None
    assert server.backend.works[0].params.logprobs is None


def test_the_engines_complaint_names_this_endpoints_field(tokenizer: Tokenizer) -> None:
    complaint = Delta(
        "",
        finish_reason=FinishReason.ERROR,
        error="7 prompt tokens and max_tokens 9 need 16 KV cache positions; lower max_tokens",
        parameter="max_tokens",
    )
    server = ResponsesServer(tokenizer, [complaint])
    _, param, message = server.refusal(input="Hi")
    assert param == "max_output_tokens"
    assert message.endswith("lower max_output_tokens")
