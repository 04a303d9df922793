"""Connections on which a client says half of a request, or takes nothing of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from specinfer.serve.server import _protocol

WHOLE = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
PIECE = b"x" * (1 << 20)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    pieces = 30 if scope["path"] == "/long" else 1
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(pieces):
        more = number < pieces - 1
        await send({"type": "http.response.body", "body": PIECE if more else b"end", "more_body": more})


@asynccontextmanager
async def listening(idle: float) -> AsyncGenerator[tuple[int, ServerState]]:
    """The port of a server with that protocol, and what it knows of its connections."""
    config = uvicorn.Config(answer, log_config=None, lifespan="off", timeout_keep_alive=60)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: _protocol(idle)(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1], state


async def until_none(state: ServerState) -> None:
    async with asyncio.timeout(10):
        while state.connections:
            await asyncio.sleep(0.01)


def test_half_a_request_is_not_waited_for_whether_it_is_the_first_or_not() -> None:
    async def run() -> None:
        async with listening(0.05) as (port, state):
            for said in (b"", b"GET /sh", WHOLE % b"short" + b"GET /sh"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                told = await asyncio.wait_for(reader.read(), 10)  # until the server closes it
                assert told.count(b"200 OK") == said.count(b"\r\n\r\n")
                writer.close()
            await until_none(state)

    asyncio.run(run())


def test_a_connection_whose_reader_takes_nothing_is_gone_in_time() -> None:
    async def run() -> None:
        async with listening(0.1) as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(WHOLE % b"long")
            await reader.readexactly(1)
            assert state.connections
            await until_none(state)
            writer.close()

    asyncio.run(run())


def test_a_reader_that_takes_its_time_gets_all_of_it() -> None:
    async def run() -> None:
        async with listening(5.0) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(WHOLE % b"long")
            await asyncio.sleep(0.1)
            size, told = 0, b""
            while b"end" not in told:
                told = await reader.read(1 << 20)
                size += len(told)
            assert size > 29 << 20
            writer.close()

    asyncio.run(run())
