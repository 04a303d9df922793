"""The engine's process as the server sees it: one that dies as soon as it is ready, one that never starts."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.serve import process_backend
from specinfer.serve.backend import BackendError
from specinfer.serve.process_backend import ProcessBackend
from specinfer.serve.work import EngineFacts, Work
from tests.virtual_time import run_virtual

# It is ready at once, and the first time it ends at once as well.
ENGINE = """#!{python}
import pathlib, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
connection.recv_bytes()
connection.send(("ready", None))
begun = pathlib.Path(__file__).with_suffix(".begun")
if not begun.exists():
    begun.touch()
    sys.exit(3)
try:
    while True:
        connection.recv_bytes()
except EOFError:
    pass
"""
WORK = Work("w", (1,), SamplingParams(seed=1))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


def threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("engine-"))


def test_an_engine_that_dies_as_soon_as_it_is_ready_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "engine"
    script.write_text(ENGINE.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    to_thread = asyncio.to_thread

    async def late(call: Callable[..., Any], *given: Any) -> Any:
        """As on a loop that is busy when the engine is ready."""
        made = await to_thread(call, *given)
        await asyncio.sleep(0.2)
        return made

    monkeypatch.setattr(asyncio, "to_thread", late)

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        await until(lambda: backend.restarts == 1)
        await until(lambda: threads() == ["engine-reader", "engine-writer"])  # none of the first one's
        assert backend.pid is not None
        await backend.close()
        await until(lambda: not threads())

    asyncio.run(run())


class Hopeless:
    """An engine's handle, of which only the first one ever starts."""

    made: list[Hopeless] = []

    def __init__(self, loop: Any, deliver: Any, died: Callable[[Hopeless], None], log: Any) -> None:
        self.died = died
        self.made.append(self)

    async def start(self, config: EngineConfig) -> EngineFacts:
        if len(self.made) > 1:
            raise UserError("the model is gone")
        return EngineFacts(10, 10, 1)

    def status(self) -> int:
        return 1

    def kill(self) -> None:
        pass

    def send(self, message: object) -> None:
        pass


def test_nobody_waits_for_an_engine_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_backend, "EngineHandle", Hopeless)
    monkeypatch.setattr(Hopeless, "made", [])

    async def ask(backend: ProcessBackend) -> None:
        async for _ in backend.generate([WORK]):
            raise AssertionError("nobody answers")

    async def test() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        Hopeless.made[0].died(Hopeless.made[0])
        for _ in range(2):  # who was there before it was given up, and who came when it was
            with pytest.raises(BackendError, match="cannot be started again: the model is gone"):
                await asyncio.wait_for(ask(backend), 300)
            await asyncio.sleep(1000)
        await asyncio.sleep(2000 * 60)  # it is tried again, however often
        tried = len(Hopeless.made)
        assert tried > 1500
        await asyncio.sleep(120)
        assert len(Hopeless.made) > tried
        await backend.close()

    run_virtual(test())
