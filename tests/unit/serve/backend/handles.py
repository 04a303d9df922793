"""Scripted engine handles, and requests to a backend that uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.errors import UserError
from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SpeculationParams
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import EngineInfo, Work

CONFIG = EngineConfig(model="m")
WORK = Work("w", (1,), SamplingParams(seed=1))
Backends = AsyncIterator[ReplicaBackend]


class Handle:
    """A scripted engine in place of an EngineChild."""

    made: list[Handle] = []
    max_length = 10_000  # positions in its cache
    fingerprint = "one"

    def __init__(self, log: tuple[str, str], number: int = 0, count: int = 1, cluster: Any = None) -> None:
        self.number, self.cluster = number, cluster
        self.given: list[Work] = []
        self.gone: list[str] = []  # works that were aborted
        self.written: dict[str, int] = {}  # tokens by work
        self.status: int | None = None
        self.pid = len(self.made)
        self.killed = self.closed = False
        self.is_stopped = False  # True: it answers no "ask" message
        self.state = Statistics()  # its answer to "ask"
        self.made.append(self)

    async def start(self, config: EngineConfig, loop: Any, *listeners: Callable[..., None]) -> EngineInfo:
        self._deliver, self._died = listeners
        self.config = config
        return EngineInfo(10_000, self.max_length, fingerprint=self.fingerprint)

    def kill(self) -> None:
        self.killed = True
        asyncio.get_running_loop().call_soon(self.dies)

    async def close(self) -> None:
        self.closed = True

    def send(self, message: tuple[str, Any]) -> None:
        command, argument = message
        if command == "add":
            self.given += argument
        elif command == "abort":
            self.gone += argument
        elif command == "ask" and not self.is_stopped:
            self.says("answer", argument, self.state)

    def says(self, *message: Any) -> None:
        self._deliver(self, message)

    def writes(self, name: str, *tokens: int, last: bool = False) -> None:
        """Send new tokens of a work; `last` ends it."""
        reason = FinishReason.LENGTH if last else None
        self.written[name] = self.written.get(name, 0) + len(tokens)
        self.says("deltas", [Delta(name, "x" * len(tokens), tokens, finish_reason=reason)], None)

    def dies(self) -> None:
        self.status = -9
        self._died(self)


class Late(Handle):
    """An engine that takes 10 seconds to start."""

    async def start(self, *given: Any) -> EngineInfo:
        await asyncio.sleep(10)
        return await super().start(*given)


def cannot_start(number: int, times: int, failure: Exception | None = None) -> type[Handle]:
    """Return a class of handles; the first `times` starts of one replica fail."""

    class Failing(Handle):
        failed = 0

        async def start(self, *given: Any) -> EngineInfo:
            if self.number == number and type(self).failed < times:
                type(self).failed += 1
                raise failure or UserError("no memory")
            return await super().start(*given)

    return Failing


MSS = replace(WORK, params=SamplingParams(seed=1, speculation=SpeculationParams(verifier="mss")))


class Answering:
    """A work in progress, and the tokens received so far."""

    open: list[Answering] = []

    def __init__(self, backend: ReplicaBackend, name: str, work: Work = WORK, session: str = "") -> None:
        self.name = name
        self.tokens: list[int] = []
        self._deltas = backend.generate([replace(work, id=name)], session)
        self.task = asyncio.ensure_future(self._read())
        self.open.append(self)

    async def _read(self) -> list[int]:
        async for delta in self._deltas:
            self.tokens += delta.token_ids
        return self.tokens


async def answering(backend: ReplicaBackend, names: str) -> list[Answering]:
    """A work of that name in each of these sessions."""
    works = [Answering(backend, name, session=name) for name in names]
    await asyncio.sleep(0)
    return works


@asynccontextmanager
async def engines(count: int = 1, config: EngineConfig = CONFIG, **options: Any) -> Backends:
    """A backend whose first engine runs; works that are in progress at the end are cancelled."""
    backend = ReplicaBackend(config, count, **options)
    await backend.start()
    yield backend
    while Answering.open:
        Answering.open.pop().task.cancel()
    await backend.close()


@asynccontextmanager
async def replicas(count: int, **options: Any) -> Backends:
    """A backend whose engines all run, which leaves no task behind."""
    async with engines(count, **options) as backend:
        await asyncio.sleep(1)
        yield backend
    await asyncio.sleep(1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def given(handle: Handle) -> dict[str, tuple[int, ...]]:
    """Return a handle's unfinished works by id, with their earlier output."""
    return {work.id: work.prior_output for work in handle.given if work.id not in handle.gone}
