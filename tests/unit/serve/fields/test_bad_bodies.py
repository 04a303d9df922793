"""Any body gets a 2xx or 4xx answer, and clients that go away leave nothing behind."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings

from tests.served import Served
from tests.unit.serve.backend.listeners import until

pytestmark = pytest.mark.thorough

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


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
    until(lambda: "abort" in served.get("/metrics").text)
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
