"""Clients that send too much or no HTTP: memory, and the answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools
import pytest

from specinfer.serve.http.connection import (
    MAX_HEAD,
    MAX_HEADERS,
    PIECE,
)
from tests.unit.serve.http.pipes import HEAD, Server, run, settle

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"


class Counted:
    """The parser, which counts the bytes that it is given."""

    fed = 0

    def __init__(self, protocol: object) -> None:
        self._parser = httptools.HttpRequestParser(protocol)

    def feed_data(self, data: bytes) -> None:
        type(self).fed += len(data)
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


ENDLESS = {
    "headers": (HEAD, b"a:\r\n", 431),
    "a header's name": (HEAD, b"a", 431),
    "a header's value": (HEAD + b"a: ", b"a", 431),
    "folded lines of a header": (HEAD + b"a: b", b"\r\n c", 400),  # not allowed any more
    "a URL": (b"GET /", b"a", 414),
    "a query": (b"GET /?", b"a", 414),
    "a method": (b"", b"G", 400),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n", 431),
    "a trailer's name": (CHUNKED + b"0\r\n", b"a", 431),
    "a trailer's value": (CHUNKED + b"0\r\na: ", b"a", 431),
    "a chunk's extension": (CHUNKED + b"5;", b"a", 431),
    "nothing but ends of lines": (b"", b"\r\n", 431),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("size", [1, 1000, 256 << 10])
def test_endless_requests_are_refused_early(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, more, status = ENDLESS[name]
    monkeypatch.setattr(Counted, "fed", 0)

    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.parser = Counted(one)  # type: ignore[assignment]
        one.data_received(head)
        await settle()  # it is being answered, where the head has an end
        for _ in range(2 * MAX_HEAD):
            if pipe.is_ended:
                break
            one.data_received(more * max(1, size // len(more)))
        assert pipe.is_ended
        assert Counted.fed <= len(head) + MAX_HEAD + 2 * PIECE
        assert pipe.statuses == [status]
        assert json.loads(pipe.received.split(b"\r\n\r\n")[1])["error"]["message"]
        assert b"\r\nconnection: close\r\n" in pipe.received
        assert len(one.headers or ()) <= MAX_HEADERS
        await settle()
        assert server.events == (["gone"] if head.startswith(CHUNKED) else [])
        one.connection_lost(None)
        assert (server.connections.size, server.connections.held) == (0, 0)

    run(test)


def test_a_trailer_does_not_pass_for_a_header() -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(CHUNKED + b"0\r\nAuthorization: Bearer key\r\n\r\n")
        await settle()
        assert pipe.statuses == [200]
        assert [name for name, _ in server.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]

    run(test)


UPGRADE = (
    b"POST /x HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 11\r\nHost: x\r\n"
    b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nUpgrade: h2c\r\nX-Other: 1\r\n\r\nhello again"
)


@pytest.mark.parametrize("size", [1, 10, 100, 10_000])
def test_an_upgrade_is_not_made_and_the_body_is_read(size: int) -> None:
    """Java's client requests HTTP/2 with each request until the server declines."""

    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        sent = (
            UPGRADE * 2 + b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        for start in range(0, len(sent), size):
            one.data_received(sent[start : start + size])
            await asyncio.sleep(0)
        await settle()
        assert pipe.statuses == [200, 200, 200]
        assert pipe.received.count(b"11 bytes") == 2
        assert [scope["method"] for scope in server.scopes] == ["POST", "POST", "GET"]
        names = [name for name, _ in server.scopes[0]["headers"]]
        assert names == [b"connection", b"content-length", b"host", b"x-other"]
        assert not pipe.is_ended

    run(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 501),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200),
    ],
)
def test_unknown_transfer_codings_are_refused(sent: bytes, status: int) -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(sent)
        await settle()
        assert pipe.statuses == [status]
        assert pipe.is_ended == (status != 200)

    run(test)


@pytest.mark.parametrize(
    "sent", [b"\x00nonsense", HEAD + b"a" * 2 * MAX_HEAD, HEAD + b"Content-Length: x\r\n\r\n"]
)
def test_no_error_stands_within_an_earlier_answer(sent: bytes) -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await settle()
        one.data_received(sent)
        one.data_received(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not pipe.is_ended
        server.hold.set()
        await settle()
        assert pipe.statuses == [200]
        assert pipe.received.endswith(b"\r\n0 bytes\r\n0\r\n\r\n")
        assert pipe.is_ended

    run(test)


def test_an_answer_before_the_body_ends_the_connection() -> None:
    """But not before the client has had time to read it; what it sends meanwhile is dropped."""

    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(b"POST /deaf HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
        await settle()
        assert pipe.statuses == [200]
        assert b"\r\nconnection: close\r\n" in pipe.received
        assert pipe.has_ended
        assert not pipe.is_closed
        for _ in range(100):
            one.data_received(b"x" * 100_000)
        assert server.connections.held == 0
        one.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await settle()
        assert pipe.statuses == [200]
        assert len(server.scopes) == 1

    run(test)
