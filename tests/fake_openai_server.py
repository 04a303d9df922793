"""A fake server of OpenAI's API over raw sockets, whose bytes the test determines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Received:
    """A received request."""

    path: str
    headers: dict[str, str]
    body: Any  # None without a body


@dataclass(frozen=True)
class Reply:
    """The packets of a response, one transfer chunk each."""

    packets: Sequence[bytes]
    status: str = "200 OK"
    kind: str = "text/event-stream"
    cut: bool = False  # close the connection without ending the transfer


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def chat(text: str, finish_reason: str | None = None) -> bytes:
    """Return a chunk of a chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "choices": [choice]})


def usage(prompt: int, completion: int, **speculation: Any) -> bytes:
    """Return the last chunk of a stream, with vLLM's speculation figures."""
    chunk: dict[str, Any] = {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }
    if speculation:
        chunk["metrics"] = {"speculative_decoding": speculation}
    return event(chunk)


def error(status: str, message: str) -> Reply:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return Reply([json.dumps(body).encode()], status, "application/json")


MODELS = Reply([b'{"object": "list", "data": [{"id": "fake-model"}]}'], kind="application/json")


@dataclass
class FakeServer:
    """A context manager; `asked` holds the received completion requests, in order."""

    answer: Callable[[Received], Reply]
    together: int = 1  # answer after this number of requests
    models: Reply = MODELS
    port: int = 0  # 0: a free port
    received: list[Received] = field(default_factory=list)
    connections: int = 0  # so far
    url: str = ""

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._barrier = asyncio.Barrier(self.together)
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._over.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (received := await self._read(reader)) is not None:
                reply = await self._reply(received)
                head = f"HTTP/1.1 {reply.status}\r\nContent-Type: {reply.kind}\r\nTransfer-Encoding: chunked"
                writer.write(head.encode() + b"\r\n\r\n")
                for packet in reply.packets:
                    writer.write(f"{len(packet):x}\r\n".encode() + packet + b"\r\n")
                    await writer.drain()
                if reply.cut:
                    break
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has disconnected
        finally:
            writer.close()

    async def _reply(self, received: Received) -> Reply:
        if received.path == "/v1/models":
            return self.models
        self.received.append(received)
        await self._barrier.wait()
        return self.answer(received)

    async def _read(self, reader: asyncio.StreamReader) -> Received | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Received(head[0].split()[1], headers, json.loads(body) if body else None)
