"""Streams of events: whatever ends them, what makes them is told at once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterator

import pytest
from starlette.types import Message

from specinfer.serve.event_stream import event, stream

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": "/", "headers": []}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nobody may leave the end of a stream to it."""
    gc.disable()
    yield
    gc.enable()


async def endless(closed: list[str]) -> AsyncGenerator[str]:
    try:
        while True:
            yield event("more")
            await asyncio.sleep(0)
    finally:
        closed.append("closed")


async def stay() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_a_reader_that_is_let_go_ends_what_is_made_for_it(taken: int) -> None:
    async def run() -> None:
        closed: list[str] = []
        left = taken

        async def send(message: Message) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise TimeoutError

        response = await stream(endless(closed))
        with pytest.raises(TimeoutError):
            await response(SCOPE, stay, send)
        assert closed == ["closed"]

    asyncio.run(run())


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_client_that_goes_away_while_it_takes_nothing_ends_what_is_made_for_it(taken: int) -> None:
    async def run() -> None:
        closed: list[str] = []
        left, stuck = taken, asyncio.Event()

        async def send(message: Message) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                stuck.set()
                await asyncio.Event().wait()

        async def go() -> Message:
            await stuck.wait()
            return {"type": "http.disconnect"}

        response = await stream(endless(closed))
        await response(SCOPE, go, send)
        assert closed == ["closed"]

    asyncio.run(run())
