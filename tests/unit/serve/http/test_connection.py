"""Connections with half requests, several requests at once, or a client that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from specinfer.serve.http.connection import Connection, Connections

WHOLE = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
PIECE = b"x" * (1 << 20)
EVENTS: list[str] = []  # events of /wait


async def wait(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer when the client has gone, as an endpoint whose answer takes its time."""
    EVENTS.append(f"{scope['path']} begins")
    while (await receive())["type"] != "http.disconnect":
        pass
    EVENTS.append(f"{scope['path']} is closed")


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"].startswith("/wait"):
        await wait(scope, receive, send)
        return
    if scope["path"].startswith("/slow"):
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(0.05)
    pieces = 30 if scope["path"] == "/long" else 1
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(pieces):
        more = number < pieces - 1
        last = scope["path"].encode() + b" end"
        await send({"type": "http.response.body", "body": PIECE if more else last, "more_body": more})


@asynccontextmanager
async def listening(
    idle: float, connections: Connections | None = None
) -> AsyncGenerator[tuple[int, ServerState]]:
    """The port of a server with that protocol, and what it knows of its connections."""
    connections = connections or Connections(1000, 1 << 30)
    config = uvicorn.Config(answer, log_config=None, lifespan="off", timeout_keep_alive=60)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(
            idle=idle, connections=connections, config=config, server_state=state, app_state={}
        ),
        "127.0.0.1",
        0,
    )
    async with server:
        yield server.sockets[0].getsockname()[1], state
        for connection in [*state.connections]:  # since Python 3.12 a server that is closed waits for them
            assert isinstance(connection, HttpToolsProtocol)
            connection.transport.abort()


async def until_none(state: ServerState) -> None:
    async with asyncio.timeout(60):
        while state.connections:
            await asyncio.sleep(0.01)


def test_half_a_request_is_not_waited_for_whether_it_is_the_first_or_not() -> None:
    async def run() -> None:
        async with listening(0.05) as (port, state):
            for sent in (b"", b"GET /sh", WHOLE % b"short" + b"GET /sh"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                received = await asyncio.wait_for(reader.read(), 10)  # until the server closes it
                assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")
                writer.close()
            await until_none(state)

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x00\xee", b"GET / HTTP/9\r\n\r\n", b"hello\r\n\r\n"])
def test_malformed_http_gets_an_error_in_the_usual_format(sent: bytes) -> None:
    async def run() -> bytes:
        async with listening(5.0) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            received = await asyncio.wait_for(reader.read(), 60)  # until the server closes it
            writer.close()
            return received

    head, body = asyncio.run(run()).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert f"content-length: {len(body)}".encode() in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("not an HTTP request: ")
    assert "TLS" in error["message"]


def test_a_connection_whose_client_does_not_read_is_closed() -> None:
    async def run() -> None:
        async with listening(0.1) as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(WHOLE % b"long")
            await reader.readexactly(1)
            assert state.connections
            await until_none(state)
            writer.close()

    asyncio.run(run())


@pytest.fixture
def received() -> list[str]:
    EVENTS.clear()
    return EVENTS


async def until_received(received: list[str], *lines: str) -> None:
    async with asyncio.timeout(60):
        while received != list(lines):
            await asyncio.sleep(0.01)


async def until_idle(state: ServerState) -> None:
    await until_none(state)
    async with asyncio.timeout(60):
        while state.tasks:
            await asyncio.sleep(0.01)


POST = b"POST /slow2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"


def test_requests_that_come_together_are_answered_in_their_order() -> None:
    """In one segment, and in pieces that end within a request."""

    async def run() -> None:
        async with listening(5.0) as (port, state):
            sent = WHOLE % b"slow1" + POST + WHOLE % b"short3" + WHOLE % b"slow4"
            for size in (len(sent), 7, 50):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                    await asyncio.sleep(0.001)
                heard = b""
                while b"/slow4 end" not in heard:
                    heard += await asyncio.wait_for(reader.read(1 << 16), 10)
                ends = [
                    heard.index(b"%b end" % path) for path in (b"/slow1", b"/slow2", b"/short3", b"/slow4")
                ]
                assert ends == sorted(ends)
                assert heard.count(b"200 OK") == 4
                writer.close()
                await until_idle(state)

    asyncio.run(run())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("following", [WHOLE % b"wait2", POST, WHOLE % b"wait2" * 3, b"GET /wa", POST[:-3]])
def test_a_client_that_goes_away_is_missed_by_the_request_that_is_answered(
    received: list[str], following: bytes, together: bool
) -> None:
    """This holds for any bytes that the client sent after it; queued requests never start."""

    async def run() -> None:
        async with listening(5.0) as (port, state):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            if together:
                writer.write(WHOLE % b"wait1" + following)
                await until_received(received, "/wait1 begins")
            else:
                writer.write(WHOLE % b"wait1")
                await until_received(received, "/wait1 begins")
                await asyncio.sleep(0.01)  # it waits for the end of the connection
                writer.write(following)
                await asyncio.sleep(0.05)
            writer.close()
            await until_received(received, "/wait1 begins", "/wait1 is closed")
            await until_idle(state)
        assert received == ["/wait1 begins", "/wait1 is closed"]

    asyncio.run(run())
