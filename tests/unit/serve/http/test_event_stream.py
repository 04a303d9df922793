"""Streams of events: their ends, and the immediate end of their sources."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterator
from contextlib import nullcontext

import pytest
from starlette.types import Message

from specinfer.serve.http.api_error import ApiError
from specinfer.serve.http.event_stream import PING, EventStream, event
from tests.virtual_time import run_virtual

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": "/", "headers": []}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """The garbage collector must not end a stream."""
    gc.disable()
    yield
    gc.enable()


async def streamed(events: AsyncGenerator[str], ping: float = 0.0) -> EventStream:
    return EventStream(events, await anext(events), "data: [DONE]\n\n", ping)


async def endless(closed: list[str]) -> AsyncGenerator[str]:
    try:
        while True:
            yield event("more")
            await asyncio.sleep(0)
    finally:
        closed.append("closed")


async def stay() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("it waits forever")


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
@pytest.mark.parametrize("stays", [True, False])
async def test_a_client_that_does_not_read_or_goes_closes_the_events(taken: int, *, stays: bool) -> None:
    closed: list[str] = []
    left, stuck = taken, asyncio.Event()

    async def send(message: Message) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            if stays:
                raise TimeoutError
            stuck.set()
            await stay()

    async def receive() -> Message:
        await (stay() if stays else stuck.wait())
        return {"type": "http.disconnect"}

    response = await streamed(endless(closed))
    with pytest.raises(TimeoutError) if stays else nullcontext():
        await response(SCOPE, receive, send)
    assert closed == ["closed"]


async def delayed(after: float, *pieces: str | ApiError, pause: float = 0.0) -> AsyncGenerator[str]:
    """Admitted after a second; sends the first piece after `after` more, and pauses after each."""
    await asyncio.sleep(1.0)
    yield ""
    await asyncio.sleep(after)
    for one in pieces:
        if isinstance(one, ApiError):
            raise one
        yield event(one)
        await asyncio.sleep(pause)


def sent(events: AsyncGenerator[str], *, ping: float) -> list[tuple[float, bytes]]:
    """Return the sent pieces with their times; the start of the response is b"start"."""
    found: list[tuple[float, bytes]] = []

    async def run() -> None:
        async def send(message: Message) -> None:
            now = asyncio.get_running_loop().time()
            found.append((now, message.get("body", b"start")))

        response = await streamed(events, ping)
        await response(SCOPE, stay, send)

    run_virtual(run())
    return found


def test_a_stream_starts_at_admission_and_is_kept_alive() -> None:
    a, b, done = event("a").encode(), event("b").encode(), b"data: [DONE]\n\n"
    ping = PING.encode()
    expected = [(1.0, b"start"), *((t, ping) for t in (16.0, 31.0)), (42.0, a), (57.0, ping), (62.0, b)]
    expected += [(77.0, ping), (82.0, done), (82.0, b"")]
    assert sent(delayed(41.0, "a", "b", pause=20.0), ping=15.0) == expected
    quiet = sent(delayed(41.0, "a"), ping=0.0)
    assert quiet == [(1.0, b"start"), (42.0, a), (42.0, done), (42.0, b"")]


def test_a_failure_after_admission_is_the_last_event() -> None:
    error = ApiError("the engine died", status=500)
    expected = [(1.0, b"start"), (6.0, PING.encode()), (10.0, error.event.encode()), (10.0, b"")]
    assert sent(delayed(9.0, error), ping=5.0) == expected


@pytest.mark.parametrize("gone_after", [0.5, 3.0])  # before it is admitted, and before the first word
async def test_a_disconnect_while_waiting_closes_the_events(gone_after: float, virtual: None) -> None:
    closed: list[str] = []

    async def waiting() -> AsyncGenerator[str]:
        try:
            async for one in delayed(1000.0, "a"):
                yield one
        finally:
            closed.append("closed")

    async def send(message: Message) -> None:
        pass

    async def go() -> Message:
        await asyncio.sleep(gone_after)
        return {"type": "http.disconnect"}

    async def answer() -> None:
        await (await streamed(waiting(), 1.0))(SCOPE, go, send)

    task = asyncio.ensure_future(answer())
    if gone_after < 1.0:  # which `unless_disconnected` sees
        await asyncio.sleep(gone_after)
        task.cancel()
        await asyncio.wait({task})
    else:
        await task
    assert closed == ["closed"]
    assert len(asyncio.all_tasks()) == 1
