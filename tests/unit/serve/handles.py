"""Handles of engines that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.errors import UserError
from specinfer.request import Delta, FinishReason
from specinfer.serve.work import EngineInfo, Work

WORK = Work("w", (1,), SamplingParams(seed=1))


class Handle:
    """In an EngineChild's place, an engine that does what a test says."""

    made: list[Handle] = []
    longest = 10_000  # positions of its cache
    fingerprint = "one"

    def __init__(self, log: tuple[str, str], number: int = 0, count: int = 1) -> None:
        self.number = number
        self.given: list[Work] = []
        self.gone: list[str] = []  # works that were aborted
        self.written: dict[str, int] = {}  # tokens by work
        self.status: int | None = None
        self.pid = len(self.made)
        self.killed = False
        self.closed = False
        self.is_stopped = False  # it answers nobody
        self.state = Statistics()  # its answer to whoever asks
        self.made.append(self)

    async def start(
        self, config: EngineConfig, loop: Any, deliver: Callable[..., None], died: Callable[..., None]
    ) -> EngineInfo:
        self._deliver, self._died = deliver, died
        return EngineInfo(10_000, self.longest, fingerprint=self.fingerprint)

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
        """So many tokens of a work, with which it may end."""
        reason = FinishReason.LENGTH if last else None
        self.written[name] = self.written.get(name, 0) + len(tokens)
        self.says("deltas", [Delta(name, "x" * len(tokens), tokens, finish_reason=reason)], None)

    def dies(self) -> None:
        self.status = -9
        self._died(self)


class Hopeless(Handle):
    """Only the first one ever starts."""

    async def start(self, *given: Any) -> EngineInfo:
        if len(self.made) > 1:
            raise UserError("the model is gone")
        return await super().start(*given)
