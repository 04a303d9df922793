"""Connections without sockets: tests pass bytes in and read the bytes of the answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from specinfer.serve.http.connection import Connection, Connections

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"


class Pipe(asyncio.Transport):
    """The client's side of a connection; it keeps the received bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.received = b""
        self.is_closed = False
        self.has_ended = False  # True after the server's end of file; it may still read

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_ended
        self.received += bytes(data)

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
    def is_ended(self) -> bool:
        return self.is_closed or self.has_ended

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", self.received)]


class Server:
    """Connections to an application that answers with the size of the body and records its scopes."""

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
