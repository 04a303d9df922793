"""What a request says, server-sent events, and answers that end when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from io import BytesIO
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specinfer.serve.http.api_error import ADMITTED, ApiError

PING: Final = ": ping\n\n"  # a comment: clients drop it, and proxies see that the stream lives
_Answer = TypeVar("_Answer")
_ENCODED: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: object) -> str:
    """A JSON value as an event."""
    return f"data: {_ENCODED(value)}\n\n"


def typed_events(values: Iterable[Mapping[str, Any]]) -> str:
    """JSON objects as events that are named by their `type`."""
    return "".join(f"event: {one['type']}\n{event(one)}" for one in values)


async def stream(
    events: AsyncGenerator[str], *, done: str = "data: [DONE]\n\n", ping: float = 0.0
) -> StreamingResponse:
    """Events as a response, which begins when the engine has taken the request, or with the first event.

    An error before that is an error of its own; one behind it is an event, the last. `done` comes at the end
    of a stream without. Whenever nothing has been sent for `ping` seconds a comment is, unless that is 0.
    """
    admitted = asyncio.Event()
    outside = ADMITTED.set(admitted)
    first = asyncio.ensure_future(_first(events))  # in a context of its own, where that is known
    ADMITTED.reset(outside)
    taken = asyncio.ensure_future(admitted.wait())
    try:
        await asyncio.wait({first, taken}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _cancel(first)
        raise
    finally:
        taken.cancel()
    if first.done():
        first.result()

    return _Events(events, first, done, ping)


async def _first(events: AsyncGenerator[str]) -> str:
    return await anext(events, "")


class _Events(StreamingResponse):
    """A response that is kept alive while nothing is said, and whose events are closed with it.

    The framework leaves that to the garbage collector where it stops while it sends: a reader that takes
    nothing would have its answer made to the end.
    """

    def __init__(
        self, events: AsyncGenerator[str], first: asyncio.Future[str], done: str, ping: float
    ) -> None:
        self._events = events
        self._first = first  # of them
        self._done = done
        self._ping = ping
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},  # a proxy hands on at once
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _cancel(self._first)
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        """The events, with comments in between."""
        loop = asyncio.get_running_loop()
        sent = loop.time()

        async def say(text: str) -> None:
            nonlocal sent
            sent = loop.time()
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(sent + self._ping - loop.time())
                if loop.time() >= sent + self._ping:
                    await say(PING)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pinging = asyncio.ensure_future(keep_alive()) if self._ping else None
        try:
            await say(await self._first)
            async for one in self._events:
                await say(one)
            await say(self._done)
        except ApiError as error:
            await say(error.event)
        finally:
            if pinging is not None:
                await _cancel(pinging)
        await send({"type": "http.response.body", "body": b""})


async def _cancel(task: asyncio.Future[Any]) -> None:
    """End a task, and return when it has ended."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # nobody else asks for it


async def body_of(request: Request) -> bytes:
    """A request's body, which is in memory once, and no longer than the caller keeps it."""
    body = BytesIO()
    async for piece in request.stream():
        body.write(piece)
    return body.getvalue()  # its own bytes, not a copy


async def unless_gone(request: Request, answer: Coroutine[Any, Any, _Answer]) -> _Answer:
    """What `answer` returns; cancelled when the client goes away, with ApiError for nobody to read."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError("the client went away", status=499)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(request: Request) -> None:
    """Return when the client has gone; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
