"""A server that gets a signal to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import uvicorn

from specinfer.serve.api.service import Service
from specinfer.serve.server import _Server


def nothing(*_: object) -> None:
    """A handler, so that a signal that the server does not take ends no test run."""


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    one: signal.Signals = request.param
    before = signal.signal(one, nothing)
    yield one
    signal.signal(one, before)


@pytest.mark.parametrize("waiting", [0, 10_000])  # messages of an engine, while the loop is kept from looking
def test_a_signal_works_while_the_wakeup_pipe_is_full(number: signal.Signals, waiting: int) -> None:
    async def is_heard() -> bool:
        config = uvicorn.Config("none:app", log_config=None, lifespan="off")
        server = _Server(config, cast(Service, SimpleNamespace()))
        loop = asyncio.get_running_loop()
        with server.capture_signals():
            for _ in range(waiting):
                loop.call_soon_threadsafe(int)
            signal.raise_signal(number)
            await asyncio.sleep(0.05)  # a loop that watches for signals has seen them by now
        return server.should_exit

    assert asyncio.run(is_heard())
    assert signal.getsignal(number) is nothing
