"""Server-sent events, and answers that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specinfer.serve.http.api_error import ApiError

PING: Final = ": ping\n\n"  # a comment: clients ignore it, and proxies keep the stream open
_Answer = TypeVar("_Answer")
_ENCODED: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: object) -> str:
    """Write a JSON value as an event."""
    return f"data: {_ENCODED(value)}\n\n"


def typed_events(values: Iterable[Mapping[str, Any]]) -> str:
    """Write JSON objects as events named by their `type`."""
    return "".join(f"event: {one['type']}\n{event(one)}" for one in values)


class EventStream(StreamingResponse):
    """A response of the event `first` and the ones behind it; empty ones are not sent.

    An error becomes the last event. A stream without an error ends with `done`. A comment is sent after
    `ping` seconds without an event; 0 turns that off. The events are closed when it ends: if sending fails,
    the framework leaves that to the garbage collector, and the engine would compute the whole answer of a
    client that does not read.
    """

    def __init__(self, events: AsyncGenerator[str], first: str, done: str, ping: float) -> None:
        self._events = events
        self._first = first
        self._done = done
        self._ping = ping
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},  # proxies must not buffer
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the events, with comments in between."""
        loop = asyncio.get_running_loop()
        sent = loop.time()

        async def send_text(text: str) -> None:
            nonlocal sent
            if not text:
                return
            sent = loop.time()
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(sent + self._ping - loop.time())
                if loop.time() >= sent + self._ping:
                    await send_text(PING)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pinging = asyncio.ensure_future(keep_alive()) if self._ping else None
        try:
            await send_text(self._first)
            async for one in self._events:
                await send_text(one)
            await send_text(self._done)
        except ApiError as error:
            await send_text(error.event)
        finally:
            if pinging is not None:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})


async def unless_disconnected(request: Request, answer: Awaitable[_Answer]) -> _Answer:
    """Await `answer`; cancel it and raise ApiError when the client disconnects."""
    task = asyncio.ensure_future(answer)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError("the client disconnected", status=499)
    finally:
        disconnected.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected; its body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
