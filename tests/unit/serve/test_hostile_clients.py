"""Clients that send more than they should, or what is no request: what is kept of it, and the answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from specinfer.serve import connection
from specinfer.serve.connection import (
    MOST_HEAD,
    MOST_HEADERS,
    MOST_UNANSWERED,
    MOST_URL,
    PIECE,
    Connection,
)
from specinfer.serve.connections import SPARE, Connections

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
MiB = 1 << 20


class Pipe(asyncio.Transport):
    """The other side of a connection, which keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = b""
        self.is_closed = False
        self.has_ended = False  # the server says that nothing follows, and may go on reading

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_ended
        self.told += bytes(data)

    def write_eof(self) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    @property
    def is_over(self) -> bool:
        return self.is_closed or self.has_ended

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", self.told)]


class Server:
    """Connections to an application that says how many bytes a body has, and what it was asked."""

    def __init__(self, connections: Connections | None = None) -> None:
        self.connections = connections or Connections(1000, 1 << 30)
        self.scopes: list[Scope] = []
        self.events: list[str] = []
        self.hold = asyncio.Event()  # answers to /hold wait for it
        self.config = uvicorn.Config(
            self.answer, interface="asgi3", proxy_headers=False, log_config=None, lifespan="off", ws="none"
        )
        self.config.load()
        self.state = ServerState()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        size, more = 0, scope["path"] != "/deaf"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.events.append("gone")
                return
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hold":
            await self.hold.wait()
        await send({"type": "http.response.body", "body": b"%d bytes" % size})

    def connect(self) -> tuple[Connection, Pipe]:
        pipe = Pipe()
        made = Connection(
            idle=1000.0,
            connections=self.connections,
            config=self.config,
            server_state=self.state,
            app_state={},
        )
        made.connection_made(pipe)
        return made, pipe


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(within())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


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
    "folded lines of a header": (HEAD + b"a: b", b"\r\n c", 400),  # which are no HTTP any more
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
def test_what_has_no_end_is_given_up_before_much_is_kept(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, more, status = ENDLESS[name]
    monkeypatch.setattr(Counted, "fed", 0)

    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.parser = Counted(one)  # type: ignore[assignment]
        one.data_received(head)
        await settle()  # it is being answered, where the head has an end
        for _ in range(2 * MOST_HEAD):
            if pipe.is_over:
                break
            one.data_received(more * max(1, size // len(more)))
        assert pipe.is_over
        assert Counted.fed <= len(head) + MOST_HEAD + 2 * PIECE
        assert pipe.statuses == [status]
        assert json.loads(pipe.told.split(b"\r\n\r\n")[1])["error"]["message"]
        assert b"\r\nconnection: close\r\n" in pipe.told
        assert len(one.headers or ()) <= MOST_HEADERS
        await settle()
        assert server.events == (["gone"] if head.startswith(CHUNKED) else [])
        one.connection_lost(None)
        assert (server.connections.size, server.connections.held) == (0, 0)

    run(test)


def test_what_is_within_the_bounds_is_served() -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        lines = b"".join(b"a%d: %b\r\n" % (i, b"x" * 300) for i in range(MOST_HEADERS - 2))
        url = b"/" + b"u" * (MOST_URL - 1)
        said = b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: 3\r\n\r\nabc" % (url, lines)
        assert len(said) < MOST_HEAD
        for _ in range(3):
            for start in range(0, len(said), 1000):
                one.data_received(said[start : start + 1000])
            await settle()
        assert pipe.statuses == [200, 200, 200]
        assert len(server.scopes[0]["headers"]) == MOST_HEADERS
        assert not pipe.is_over

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
    """As Java's client asks for HTTP/2 with each request until it is told that there is none."""

    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        said = (
            UPGRADE * 2 + b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        for start in range(0, len(said), size):
            one.data_received(said[start : start + size])
            await asyncio.sleep(0)
        await settle()
        assert pipe.statuses == [200, 200, 200]
        assert pipe.told.count(b"11 bytes") == 2
        assert [scope["method"] for scope in server.scopes] == ["POST", "POST", "GET"]
        names = [name for name, _ in server.scopes[0]["headers"]]
        assert names == [b"connection", b"content-length", b"host", b"x-other"]
        assert not pipe.is_over

    run(test)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 501),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200),
    ],
)
def test_what_cannot_be_decoded_is_not_taken_for_a_body(said: bytes, status: int) -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(said)
        await settle()
        assert pipe.statuses == [status]
        assert pipe.is_over == (status != 200)

    run(test)


@pytest.mark.parametrize(
    "said", [b"\x00nonsense", HEAD + b"a" * 2 * MOST_HEAD, HEAD + b"Content-Length: x\r\n\r\n"]
)
def test_no_error_stands_within_an_earlier_answer(said: bytes) -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await settle()
        one.data_received(said)
        one.data_received(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not pipe.is_over
        server.hold.set()
        await settle()
        assert pipe.statuses == [200]
        assert pipe.told.endswith(b"\r\n0 bytes\r\n0\r\n\r\n")
        assert pipe.is_over

    run(test)


def test_an_answer_before_the_body_ends_the_connection() -> None:
    """But not before the client has had time to read it; what it sends meanwhile is dropped."""

    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(b"POST /deaf HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
        await settle()
        assert pipe.statuses == [200]
        assert b"\r\nconnection: close\r\n" in pipe.told
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


def test_bodies_together_have_a_bound_and_the_largest_that_is_not_whole_goes_first() -> None:
    most = 10 * MiB

    async def test() -> None:
        server = Server(Connections(1000, most))
        small, answered = server.connect()
        small.data_received(HEAD + b"Content-Length: 2000\r\n\r\n" + b"x" * 1000)
        large = [server.connect() for _ in range(40)]
        for one, _ in large:
            one.data_received(HEAD + b"Content-Length: 15000000\r\n\r\n")
        await settle()
        highest = 0
        for _ in range(50):
            for one, _ in large:
                one.data_received(b"x" * 250_000)
                highest = max(highest, server.connections.held)
            await asyncio.sleep(0)
        assert highest <= most
        refused = [pipe for _, pipe in large if pipe.statuses == [503]]
        assert len(refused) >= 39
        assert all(b"retry-after: 5" in pipe.told.lower() for pipe in refused)
        await settle()
        assert server.events == ["gone"] * len(refused)
        small.data_received(b"x" * 1000)
        await settle()
        assert answered.statuses == [200]
        for one, _ in large:
            one.connection_lost(None)
        assert server.connections.held == 0

    run(test)


def test_a_body_counts_until_its_request_is_answered() -> None:
    async def test() -> None:
        server = Server(Connections(1000, 13_000))
        first, _ = server.connect()
        first.data_received(b"POST /hold HTTP/1.1\r\nHost: x\r\nContent-Length: 8000\r\n\r\n" + b"x" * 8000)
        await settle()
        assert 8000 < server.connections.held < 8000 + 3000
        second, pipe = server.connect()
        second.data_received(HEAD + b"Content-Length: 3000\r\n\r\n" + b"x" * 3000)
        await settle()
        assert pipe.statuses == [503]
        server.hold.set()
        await settle()
        assert server.connections.held == 0
        third, pipe = server.connect()
        third.data_received(HEAD + b"Content-Length: 3000\r\n\r\n" + b"x" * 3000)
        await settle()
        assert pipe.statuses == [200]

    run(test)


def test_requests_that_come_all_at_once_are_answered_up_to_a_number() -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        assert server.connections.held < MOST_UNANSWERED * 3000
        async with asyncio.timeout(60):
            while not pipe.is_over:
                await asyncio.sleep(0)
        assert pipe.statuses == [200] * MOST_UNANSWERED
        assert server.connections.held == 0
        few = Server(Connections(1000, 10_000))
        one, pipe = few.connect()
        one.data_received((b"GET /hold HTTP/1.1\r\n" + b"a: " + b"x" * 1000 + b"\r\n\r\n") * 20)
        assert few.connections.held <= 10_000
        few.hold.set()
        await settle()
        assert pipe.statuses == [200] * 3
        assert pipe.is_over
        assert few.connections.held == 0

    run(test)


def test_at_the_limit_silent_connections_go_first_and_those_that_are_in_stay() -> None:
    async def test() -> None:
        server = Server(Connections(5, MiB))
        ask = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
        used, of_used = server.connect()
        used.data_received(ask)
        silent = [server.connect() for _ in range(25)]
        for one, _ in silent:  # half a request is none
            one.data_received(HEAD + b"Content-Length: 100\r\n\r\nhalf")
        await settle()
        assert [pipe.is_over for _, pipe in silent] == [True] * 21 + [False] * 4
        used.data_received(ask)
        for one, _ in silent[-4:]:
            one.data_received(b"x" * 96)
        await settle()
        assert of_used.statuses == [200, 200]
        assert all(pipe.statuses == [200] for _, pipe in silent[-4:])
        # All of them have been heard now, so whoever comes is one too many, and is told so.
        late, _ = server.connect()
        late.data_received(ask)
        used.data_received(ask)
        await settle()
        assert [connection.OVER_LIMIT in scope["state"] for scope in server.scopes[-2:]] == [True, False]
        more = [server.connect() for _ in range(2 * SPARE)]
        assert server.connections.size <= 5 + SPARE
        left = [(one, pipe) for one, pipe in more if not pipe.is_over]
        assert 0 < len(left) <= SPARE
        for one, _ in left:
            one.data_received(ask)
        await settle()
        assert all(connection.OVER_LIMIT in scope["state"] for scope in server.scopes[-len(left) :])
        used.data_received(ask)
        await settle()
        assert of_used.statuses == [200] * 4

    run(test)
