"""Any body gets a 2xx or 4xx answer, and the next request is answered as usual."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.served import Served

pytestmark = pytest.mark.thorough

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"),
    *("/v1/messages", "/v1/messages/count_tokens", "/infill"),
)
CONVERSATIONS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
FIELDS = (
    *("messages", "prompt", "tokens", "model", "stream", "stream_options", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "n", "stop", "logprobs", "top_logprobs", "logit_bias", "response_format", "regex"),
    *("choice", "grammar", "tools", "tool_choice", "prediction", "speculation", "max_tokens", "min_tokens"),
    *("presence_penalty", "repetition_penalty", "bad_words", "allowed_token_ids", "stop_token_ids", "echo"),
    *("prompt_logprobs", "logprobs_mode", "cache_salt", "trace", "user", "metadata", "best_of", "suffix"),
    *("system", "thinking", "stop_sequences", "output_config", "output_format", "context_management"),
    *("input_prefix", "input_suffix", "input_extra", "n_predict", "n_indent", "samplers", "response_fields"),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["auto", "none", "text", "json_object", "user", "a+", "x" * 300, "\x00", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*FIELDS, "role", "content", "type"]) | st.text(max_size=5), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client that keeps its connection: making one takes longer than a refusal."""
    with httpx.Client(timeout=60) as client:
        yield client


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from(PATHS),
    changed=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3),
    keep=st.booleans(),
)
def test_a_field_may_be_anything(
    served: Served, http: httpx.Client, path: str, changed: dict[str, Any], keep: bool
) -> None:
    body = {"max_tokens": 2, **(GOOD if path in CONVERSATIONS else {"prompt": "ab"}), **changed}
    if path == "/detokenize" or not keep:
        body = {"max_tokens": 2, **changed}
    answer = http.post(served.url + path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


RAW = {
    "nothing": b"",
    "no JSON": b"hello",
    "invalid UTF-8": b'{"prompt": "\xff\xfe\x80"}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "deep": b'{"prompt": ' + b"[" * 200_000,
    "deep schema": b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": '
    + b'{"name": "n", "schema": {"not":' * 90
    + b"{}"
    + b"}" * 92,
    "huge numbers": b'{"prompt": "a", "seed": ' + b"9" * 4000 + b', "max_tokens": -1e308}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "500 kB of stop": json.dumps({"prompt": "a", "max_tokens": 2, "stop": ["x" * 100] * 5000}).encode(),
    "10 MB of prompt": json.dumps({"prompt": "a b" * 3_500_000}).encode(),
    "20 MB": b" " * 20_000_000,
    "a million keys": json.dumps({f"k{i}": 1 for i in range(200_000)}).encode(),
    "a grammar that explodes": json.dumps(
        {"prompt": "a", "max_tokens": 2, "regex": "((a{1,500}){1,500}){1,500}"}
    ).encode(),
    "a schema that cannot be met": json.dumps(
        {
            "prompt": "a",
            "max_tokens": 2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 5, "maximum": 4}},
            },
        }
    ).encode(),
}


@pytest.mark.parametrize("name", RAW)
def test_a_body_may_be_anything(served: Served, name: str) -> None:
    answer = httpx.post(served.url + "/v1/completions", content=RAW[name], timeout=120)
    assert answer.status_code in (200, 400, 413), answer.text[:500]
    assert served.post("/v1/chat/completions", GOOD).status_code == 200
    served.wait_idle()


def test_clients_that_go_away_in_mid_stream_leave_nothing_behind(served: Served) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 450, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    address = urlsplit(served.url)
    for number in range(60):
        one = socket.create_connection((address.hostname or "", address.port or 0))
        one.sendall(head + body)
        if number % 3:
            one.recv(100 * (number % 3))
        one.close()
    served.wait_idle()
    until = time.monotonic() + 30
    while "abort" not in served.get("/metrics").text:
        assert time.monotonic() < until
    assert served.post("/v1/chat/completions", GOOD).status_code == 200


def test_the_api_follows_its_description_under_fuzzing(served: Served) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error

    described = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    tried = 0
    for found in described.get_all_operations():
        operation = found.ok()
        if operation.path in ("/metrics", "/"):
            continue

        @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        call()
        tried += 1
    assert tried >= 8
    served.wait_idle()
