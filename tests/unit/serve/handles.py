"""Handles of engines that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.errors import UserError
from specinfer.serve.work import EngineInfo, Work

WORK = Work("w", (1,), SamplingParams(seed=1))


class Handle:
    """In an EngineChild's place, an engine that does what a test says."""

    made: list[Handle] = []

    def __init__(self, log: tuple[str, str]) -> None:
        self.given: list[Work] = []
        self.status: int | None = None
        self.pid = 1
        self.killed = False
        self.is_stopped = False  # it answers nobody
        self.state = Statistics()  # its answer to whoever asks
        self.made.append(self)

    async def start(
        self, config: EngineConfig, loop: Any, deliver: Callable[..., None], died: Callable[..., None]
    ) -> EngineInfo:
        self._deliver, self._died = deliver, died
        return EngineInfo(10, 10)

    def kill(self) -> None:
        self.killed = True
        asyncio.get_running_loop().call_soon(self.dies)

    async def close(self) -> None:
        pass

    def send(self, message: tuple[str, Any]) -> None:
        command, argument = message
        if command == "add":
            self.given += argument
        elif command == "ask" and not self.is_stopped:
            self.says("answer", argument, self.state)

    def says(self, *message: Any) -> None:
        self._deliver(self, message)

    def dies(self) -> None:
        self.status = -9
        self._died(self)


class Hopeless(Handle):
    """Only the first one ever starts."""

    async def start(self, *given: Any) -> EngineInfo:
        if len(self.made) > 1:
            raise UserError("the model is gone")
        return await super().start(*given)
