"""The server of `specinfer view`."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from specinfer.errors import ConfigError
from specinfer.serve.http.page_server import PAGE_HEADERS, TraceServer, page_files


@pytest.fixture
def server() -> Iterator[TraceServer]:
    with TraceServer(b"{}\n", "a b&c.jsonl") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: TraceServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(server.authority, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_it_serves_the_page_and_the_trace(server: TraceServer) -> None:
    address, _, query = server.url.partition("?")
    assert address == f"http://{server.authority}/"
    assert query == "trace=a%20b%26c.jsonl"
    for path, body in {"/?" + query: page_files()["/"].body, "/trace.jsonl": b"{}\n"}.items():
        status, headers, got = ask(server, path)
        assert (status, got) == (200, body)
        assert PAGE_HEADERS.items() <= headers.items()
    assert ask(server, "/page/main.js")[1]["Content-Type"] == "text/javascript; charset=utf-8"
    assert ask(server, "/v1/models")[0] == 404


def test_a_page_elsewhere_cannot_read_the_trace(server: TraceServer) -> None:
    for host, status in {
        "evil.example": 403,
        "127.0.0.1.evil.example": 403,
        "[": 403,
        "localhost:99": 200,
    }.items():
        assert ask(server, "/trace.jsonl", Host=host)[0] == status


def test_a_port_that_is_taken_is_one_line(server: TraceServer) -> None:
    port = server.server_address[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .* give another --port"):
        TraceServer(b"", "x", port)
