"""Valid bodies, and 400 with the field at fault for others."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specinfer import SamplingParams
from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.fields.body import FieldPolicy
from specinfer.serve.http.api_error import ApiError
from specinfer.structured_output import structured_output
from tests.unit.serve.asked import HI
from tests.unit.serve.fields.bodies import MADE, PLAIN, params, read


def error_of(kind: Any, body: Any) -> dict[str, Any]:
    """The error that a body gets, when its fields are read, checked and turned into parameters."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    def make() -> None:
        fields = FieldPolicy().parse(kind, raw)
        fields.check()
        fields.params() if kind is CompletionFields else fields.sampling_params(9)

    with pytest.raises(ApiError) as caught:
        make()
    assert caught.value.status == 400
    assert not isinstance(caught.value.__context__, ValidationError)  # its faults would stay in memory
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    return dict(caught.value.body["error"])


def of_part(part: Any, end: str, expected: str) -> tuple[Any, str, str]:
    return {"messages": [{"role": "user", "content": [part]}]}, f"messages[0].content[0]{end}", expected


def guessing(part: Any) -> dict[str, Any]:
    return {"messages": HI, "prediction": {"type": "content", "content": [part]}}


def test_a_conversation_that_cannot_be_served() -> None:
    cases: list[tuple[Any, str | None, str]] = [
        ({"messages": HI, "temprature": 1}, "temprature", "--unknown-fields=ignore"),
        ({"messages": [{"role": "user", "content": "Hi", "x": 1}]}, "messages[0].x", "not a field"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid array"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "needs content"),
        of_part({"type": "text", "refusal": "No."}, ".text", "required"),
        of_part({"type": "refusal", "text": "a"}, ".refusal", "required"),
        of_part({"text": "a"}, ".type", "required"),
        of_part({"type": "image_url", "image_url": {}}, ".type", "is 'image_url'; allowed: 'text'; image in"),
        of_part("a", "", "object"),
        (guessing({"type": "text"}), "prediction.content[0].text", "required"),
        (guessing({"type": "refusal"}), "prediction.content[0].type", "is 'refusal'; allowed: 'text'"),
        ({"messages": []}, "messages", "empty"),
        ({}, "messages", "required"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "valid number"),
        ({"messages": HI, "temperature": -1}, "temperature", ">= 0"),
        ({"messages": HI, "seed": 1.5}, "seed", "integer"),
        ({"messages": HI, "stop": ["a"] * 65}, "stop", "at most 64"),
        ({"messages": HI, "stop": "a" * 1025}, "stop", "of at most 1024"),
        ({"messages": HI, "bad_words": ["a"] * 1025}, "bad_words", "at most 1024"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": HI, "prompt_logprobs": 1000}, "prompt_logprobs", "20"),
        ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice", "needs functions"),
        ({"messages": HI, "speculation": {"nodes": 3}}, "speculation", "no option 'nodes'"),
        ({"messages": HI, "regex": "a", "choice": ["b"]}, None, "regex"),
        ({"messages": HI, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ]
    for body, param, expected in cases:
        error = error_of(ChatFields, body)
        assert expected in error["message"], (body, param)
        if param is not None:
            assert error["param"] == param, (body, param)


def test_a_prompt_that_cannot_be_served() -> None:
    cases: list[tuple[Any, str]] = [
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1], "suffix": "b"}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "prediction": {"text": "b"}}, "prediction"),
    ]

    for body, param in cases:
        with pytest.raises(ApiError) as caught:
            pytest.fail(f"{body!r} has {read(CompletionFields, body).prompts()}")
        assert caught.value.body["error"]["param"].startswith(param), body


BEGUN = b'{"messages": [{"role": "user", "content": "Hi"}], '
NO_REQUESTS = [
    *(b"", b"{", b"null", b'{"messages": NaN}', b'{"messages": ' + b"[" * 100_000),
    b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    *(BEGUN + b'"temperature": ' + number for number in (b"NaN}", b"1e999}")),
    BEGUN + b'"response_format": ' + b'{"a":' * 50_000,
    BEGUN + b'"seed": ' + b"9" * 5000 + b"}",
]


def test_a_body_that_is_no_request() -> None:
    for raw in NO_REQUESTS:
        error_of(ChatFields, raw)


def test_fields_become_sampling_parameters() -> None:
    same: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    same |= {"cache_salt": "me", "speculation": {"max_nodes": 8}}
    body = {"messages": HI, "stop": "END", "logit_bias": {"42": -5}, "choice": ["yes", "no"]} | same
    fields = FieldPolicy().parse(ChatFields, json.dumps(body).encode())
    same |= {"stop": ("END",), "logit_bias": {42: -5.0}, "choice": ("yes", "no"), "max_tokens": 9}
    assert fields.params(max_tokens=9) == SamplingParams(**same)


def test_parts_of_each_type_are_given_to_the_template(recwarn: pytest.WarningsRecorder) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": parts, "tool_calls": [call]}
    fields = read(ChatFields, {"messages": [message | {"name": None}]})
    assert [one.rendered() for one in fields.messages] == [message]
    assert not recwarn.list  # pydantic warns of a part that it takes for another type


def test_a_prediction_may_be_a_text_or_as_in_conversations() -> None:
    for guess in ("a b", {"type": "content", "content": [{"type": "text", "text": "a b"}]}):
        given = read(CompletionFields, {"prediction": guess}).prediction
        assert (given if isinstance(given, str) else given.text) == "a b"


def test_white_space_between_parts_of_json_is_a_field_of_every_endpoint() -> None:
    for kind in MADE:
        for given in ("bounded", "any", "none", None):
            made = params(kind, {"json_whitespace": given})
            assert made.json_whitespace == (given or "bounded")
        error = error_of(kind, PLAIN[kind] | {"json_whitespace": "some"})
        assert error["param"] == "json_whitespace"


def test_a_grammar_of_calls_takes_the_place_of_the_form() -> None:
    form: dict[str, Any] = {"type": "json_object"}
    for kind, more in ((ChatFields, {"response_format": form}), (ResponseFields, {"text": {"format": form}})):
        fields = read(kind, more)
        assert fields.form == structured_output(form)
        made = fields.sampling_params(9, grammar="start: /a/")
        assert made.structured_output == structured_output(grammar="start: /a/")
