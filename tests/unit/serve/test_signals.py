"""A server that is told to end."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import cast

import pytest
import uvicorn

from specinfer.serve.server import _Server
from specinfer.serve.service import Service


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_while_the_pipe_that_wakes_the_loop_is_full(number: signal.Signals) -> None:
    async def is_heard() -> bool:
        server = _Server(uvicorn.Config("none:app"), cast(Service, SimpleNamespace()))
        loop = asyncio.get_running_loop()
        with server.capture_signals():
            for _ in range(10_000):  # as an engine's messages do while the loop is kept from looking
                loop.call_soon_threadsafe(int)
            signal.raise_signal(number)
            await asyncio.sleep(0)
        return server.should_exit

    before = signal.getsignal(number)
    assert asyncio.run(is_heard())
    assert signal.getsignal(number) is before
