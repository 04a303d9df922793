"""Server-sent events, and answers that end when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specinfer.serve.api_error import ApiError

_Answer = TypeVar("_Answer")
_ENCODED: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: object) -> str:
    """A JSON value as an event."""
    return f"data: {_ENCODED(value)}\n\n"


async def stream(events: AsyncGenerator[str], *, done: str = "data: [DONE]\n\n") -> StreamingResponse:
    """Events as a response, which begins with the first one: an error before it is an error of its own.

    One behind it is an event, the last; `done` comes at the end of a stream without.
    """
    try:
        first = await anext(events)
    except StopAsyncIteration:
        first = ""

    async def whole() -> AsyncGenerator[str]:
        async with aclosing(events):
            try:
                yield first
                async for one in events:
                    yield one
                yield done
            except ApiError as error:
                yield error.event

    return _Events(whole(), events)


class _Events(StreamingResponse):
    """A response whose events are closed with it.

    The framework leaves that to the garbage collector where it stops while it sends: a reader that takes
    nothing would have its answer made to the end.
    """

    def __init__(self, *generators: AsyncGenerator[str]) -> None:
        self._generators = generators  # the one that is sent, and what it reads from if it ever begins
        super().__init__(
            generators[0],
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},  # a proxy hands on at once
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for one in self._generators:
                await one.aclose()


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
