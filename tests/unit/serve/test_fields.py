"""What bodies may say, and what is answered to others: 400 with the field at fault, and nothing ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specinfer import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.chat_fields import ChatFields
from specinfer.serve.completion_fields import CompletionFields
from specinfer.serve.fields import parse
from specinfer.serve.response_fields import ResponseFields
from specinfer.serve.token_fields import DetokenizeFields

HI = [{"role": "user", "content": "Hi"}]


def error_of(kind: Any, body: Any) -> dict[str, Any]:
    """The error that a body gets, when its fields are read, checked and turned into parameters."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    def read() -> None:
        fields = parse(kind, raw)
        fields.check()
        fields.params()

    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": HI, "temprature": 1}, "temprature", "no field of this endpoint"),
        ({"messages": [{"role": "user", "content": "Hi", "x": 1}]}, "messages[0].x", "no field"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "'system'"),
        ({"messages": []}, "messages", "empty"),
        ({}, "messages", "required"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "valid number"),
        ({"messages": HI, "temperature": -1}, "temperature", ">= 0"),
        ({"messages": HI, "top_p": 0}, "top_p", "(0, 1]"),
        ({"messages": HI, "n": 0}, "n", "[1, 1024]"),
        ({"messages": HI, "seed": 1.5}, "seed", "integer"),
        ({"messages": HI, "stop": [""]}, "stop", "non-empty"),
        ({"messages": HI, "logit_bias": {"1": 1000}}, "logit_bias", "[-100, 100]"),
        ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
        ({"messages": HI, "tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"messages": HI, "service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"messages": HI, "store": True}, "store", "False"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities[0]", "'text'"),
        ({"messages": HI, "functions": []}, "functions", "no field"),
        ({"messages": HI, "speculation": {"nodes": 3}}, "speculation", "no option 'nodes'"),
        ({"messages": HI, "speculation": {"verifier": "magic"}}, "speculation", "coupled"),
        ({"messages": HI, "regex": "a", "choice": ["b"]}, None, "regex"),
        ({"messages": HI, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ],
)
def test_a_conversation_that_cannot_be_served(body: Any, param: str | None, said: str) -> None:
    error = error_of(ChatFields, body)
    assert said in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "prediction": {"text": "b"}}, "prediction"),
        ({"prompt": "a", "stream": False, "stream_options": {}}, "stream_options"),
    ],
)
def test_a_prompt_that_cannot_be_served(body: Any, param: str) -> None:
    def read() -> None:
        fields = parse(CompletionFields, json.dumps(body).encode())
        fields.check()
        fields.prompts()

    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.body["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "Hi"}], "response_format": ' + b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "Hi"}], "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_request(raw: bytes) -> None:
    error_of(ChatFields, raw)


def test_what_fields_mean() -> None:
    fields = parse(
        ChatFields,
        json.dumps(
            {
                "messages": HI,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "seed": 3,
                "stop": "END",
                "logit_bias": {"42": -5},
                "choice": ["yes", "no"],
                "cache_salt": "me",
                "speculation": {"max_nodes": 8},
            }
        ).encode(),
    )
    assert fields.params(max_tokens=9) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=("END",),
        logit_bias={42: -5.0},
        choice=("yes", "no"),
        cache_salt="me",
        speculation={"max_nodes": 8},  # type: ignore[arg-type]
        max_tokens=9,
    )


def test_messages_are_what_templates_know() -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None},
    ]
    fields = parse(ChatFields, json.dumps({"messages": messages}).encode())
    assert [message.rendered() for message in fields.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": ""},
    ]


MANY = b"[" + b"1," * 5000 + b'"a"]'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatFields, b'{"messages": %s}'),
        (ChatFields, b'{"messages": [{"role": "user", "content": %s}]}'),
        (ChatFields, b'{"messages": [], "tools": %s}'),
        (ChatFields, b'{"messages": [], "stop": %s}'),
        (CompletionFields, b'{"prompt": %s}'),
        (CompletionFields, b'{"prompt": [[1], %s]}'),
        (ResponseFields, b'{"input": %s}'),
        (DetokenizeFields, b'{"tokens": ["a", %s]}'),
    ],
)
def test_a_list_full_of_faults_is_given_up_at_the_first(kind: type[BaseModel], body: bytes) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(body % MANY)
    assert error.value.error_count() < 5


def test_a_thousand_faults_are_not_told_one_by_one() -> None:
    body = json.dumps({"prompt": "a", **{f"k{i}": i for i in range(1001)}}).encode()
    with pytest.raises(ApiError, match="the body has 1001 faults"):
        parse(CompletionFields, body)


@pytest.mark.parametrize("guess", ["a b", {"type": "content", "content": [{"type": "text", "text": "a b"}]}])
def test_a_prediction_may_be_a_text_or_as_in_conversations(guess: Any) -> None:
    fields = parse(CompletionFields, json.dumps({"prompt": "a", "prediction": guess}).encode())
    given = fields.prediction
    assert (given if isinstance(given, str) or given is None else given.text) == "a b"
