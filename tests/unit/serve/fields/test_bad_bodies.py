"""Any body gets a 2xx or 4xx answer, and the next request is answered as usual."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.served import Served

pytestmark = pytest.mark.thorough

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


RAW = {
    "no JSON": b"hello",
    "half a pair": b'{"prompt": "\\ud800"}',
    "deep schema": b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": '
    + b'{"name": "n", "schema": {"not":' * 90
    + b"{}"
    + b"}" * 92,
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
