"""Connections of uvicorn with the settings of the server, and clients that send malformed HTTP."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from specinfer.serve.config import ServeConfig
from specinfer.serve.server import _MAX_HEAD, _Server, _uvicorn_config, listen

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body and the number of headers; /wait only when the client has gone."""
    size, more = 0, scope["path"] != "/deaf"
    while more or scope["path"].startswith("/wait"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    text = f"{scope['path']} {size} bytes, {len(scope['headers'])} headers."
    await send({"type": "http.response.body", "body": text.encode()})


class Client:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader

    async def hear(self, until: bytes = b"") -> bytes:
        """Return the bytes that the server sends, to the end or to some bytes."""
        async with asyncio.timeout(60):
            return await (self._reader.readuntil(until) if until else self._reader.read())


def run(test: Callable[[Callable[[], Awaitable[Client]], _Server], Awaitable[None]], **options: Any) -> None:
    config = ServeConfig(port=0, grace=0.1, **options)
    listener = listen(config)
    made = _uvicorn_config(config, cast(Starlette, answer))
    pool = SimpleNamespace(config=config, drain=lambda: None, cut=lambda _: 0)
    server = _Server(made, cast(Any, pool))

    async def connect() -> Client:
        return Client(*await asyncio.open_connection(*listener.getsockname()))

    async def within() -> None:
        started = asyncio.Event()
        server.on_ready = started.set
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await started.wait()
        try:
            async with asyncio.timeout(120):
                await test(connect, server)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(within())


ENDLESS = {
    "headers": (HEAD, b"a:\r\n"),
    "a header's name": (HEAD, b"a"),
    "a header's value": (HEAD + b"a: ", b"a"),
    "folded lines": (HEAD + b"a: b", b"\r\n c"),
    "a URL": (b"GET /", b"a"),
    "a method": (b"", b"G"),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "a trailer's value": (CHUNKED + b"0\r\na: ", b"a"),
    "a chunk's extension": (CHUNKED + b"5;", b"a"),
    "ends of lines": (b"", b"\r\n"),
    "TLS": (b"\x16\x03\x01\x00\xee", b"\x16"),
    "another version": (b"GET / HTTP/9\r\n\r\n", b"a"),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", b"a"),
    "another coding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"a"),
}


def test_endless_and_malformed_requests_end_their_connection() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], server: _Server) -> None:
        for name, (head, more) in ENDLESS.items():
            client = await connect()
            client.writer.write(head)
            left = 40 * _MAX_HEAD // len(more)
            while left > 0 and not client.writer.transport.is_closing():
                client.writer.write(more * min(left, 1000))
                left -= 1000
                await asyncio.sleep(0)
                held = [len(one.conn.trailing_data[0]) for one in server.server_state.connections]  # type: ignore[union-attr]
                assert max(held, default=0) <= _MAX_HEAD + (256 << 10), name  # and one read of the socket
            try:
                heard = await client.hear()
            except ConnectionError:
                continue  # its last bytes came too late
            refused = b" 400 " in heard.partition(b"\r\n")[0]
            assert refused or (b"chunked" in head and not heard), (name, heard)

    run(test)


UPGRADE = (
    b"POST /x HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 11\r\nHost: x\r\n"
    b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nUpgrade: h2c\r\n\r\nhello again"
)


@pytest.mark.parametrize("size", [7, 10_000])
def test_requests_are_answered_in_their_order_and_not_upgraded(size: int) -> None:
    """Java's client requests HTTP/2 with each request. Trailers do not pass for headers."""
    sent = UPGRADE * 2 + GET % b"y" + CHUNKED + b"0\r\nAuthorization: Bearer key\r\n\r\n"
    sent += b"POST /deaf HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello" + GET % b"end"

    async def test(connect: Callable[[], Awaitable[Client]], server: _Server) -> None:
        client = await connect()
        for start in range(0, len(sent), size):
            client.writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        heard = await client.hear(b"/end 0 bytes, 1 headers.")
        found = re.findall(rb"(/\w+ \d+ bytes, \d+ headers)", heard)
        upgraded, plain = b"/x 11 bytes, 5 headers", b"/y 0 bytes, 1 headers"
        assert found[:4] == [upgraded, upgraded, plain, b"/x 5 bytes, 2 headers"]
        assert found[4:] == [b"/deaf 0 bytes, 2 headers", b"/end 0 bytes, 1 headers"]

    run(test)


def test_more_connections_than_allowed_get_503_and_silent_ones_are_closed() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], server: _Server) -> None:
        busy = [await connect() for _ in range(3)]
        for one in busy:
            one.writer.write(GET % b"wait")
        await asyncio.sleep(0.05)
        late = await connect()
        late.writer.write(GET % b"late")
        assert b" 503 " in await late.hear()
        silent = [await connect() for _ in range(20)]
        for one in silent:
            one.writer.write(HEAD)  # half a request
        for one in silent:
            with suppress(ConnectionError):
                assert await one.hear() == b""
        busy[0].writer.close()
        while len(server.server_state.connections) > 2:
            await asyncio.sleep(0.01)
        again = await connect()
        again.writer.write(GET % b"again")
        assert b"/again 0 bytes" in await again.hear(b"bytes")
        for one in busy:
            one.writer.close()

    run(test, max_connections=3)
