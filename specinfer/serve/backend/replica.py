"""Replica: an engine process that is restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import psutil

from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.request import Delta
from specinfer.serve.backend.cluster import Cluster
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.work import EngineInfo, ReplicaHealth

_LOG = logging.getLogger(__name__)
_MAX_FAILED_STARTS: Final = 3  # in a row; after them no work waits for it
_ANSWER_SECONDS: Final = 1.0  # in which a healthy engine replies with its statistics
_STOPPED_SECONDS: Final = 10  # as the timeout of an exchange of ranks
_QUESTIONS: Final = 10  # without a reply, in a row, after which an engine counts as hung


class Replica:
    """Number `number` of `count` engines with one config. Its methods belong to one event loop.

    It calls `on_deltas` with the engine's deltas, `on_lost` when the engine died, and `on_change` when an
    engine takes work or failed to start. `on_lost` gets the works that the engine was busy with, or None if
    it had not reported any. An engine without a reply for `timeout` seconds, or that a signal has stopped for
    10 seconds, is killed; 0 disables both. The first engine uses the process `child` if given. Engines run on
    `cluster` if given, else on this host.
    """

    def __init__(
        self,
        config: EngineConfig,
        number: int,
        count: int,
        log: tuple[str, str],
        *,
        on_deltas: Callable[[Replica, Sequence[Delta]], None],
        on_lost: Callable[[Replica, frozenset[str] | None], None],
        on_change: Callable[[Replica], None],
        child: EngineChild | None = None,
        cluster: Cluster | None = None,
        timeout: float = 0.0,
    ) -> None:
        self.number = number
        self.name = "the engine" if count == 1 else f"replica {number}"
        self.facts = EngineInfo(0, 0)  # current engine's, or the last one's
        self.draining = False  # gets no more works
        self.restarts = 0
        self.trouble = f"{self.name} starts"  # reason that it takes no work; empty if it does
        self._config = config
        self._count = count
        self._log = log
        self._child = child
        self._cluster = cluster
        self._timeout = timeout
        self._on_deltas, self._on_lost, self._on_change = on_deltas, on_lost, on_change
        self._engine: EngineChild | None = None  # None while one starts
        self._busy: frozenset[str] | None = None  # works that the engine is busy with, if reported
        self._state = Statistics()  # last statistics of this engine
        self._counted = Statistics()  # sum over earlier engines
        self._questions: dict[int, asyncio.Future[Statistics | None]] = {}
        self._numbers = itertools.count()
        self._failures = 0  # starts that failed in a row
        self._starting: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def serves(self) -> bool:
        """True if an engine runs and may get works."""
        return self._engine is not None and not self.draining

    @property
    def runs(self) -> bool:
        """True if an engine runs."""
        return self._engine is not None

    @property
    def is_left_out(self) -> bool:
        """True after 3 failed starts in a row: no work waits for it, but starts are still retried."""
        return self._engine is None and self._failures >= _MAX_FAILED_STARTS

    @property
    def pid(self) -> int | None:
        """Process id of the engine that runs; None while one starts."""
        return None if self._engine is None else self._engine.pid

    async def start(self) -> EngineInfo:
        """Start an engine; raises UserError with its message if it cannot serve, BackendError if it dies."""
        engine = self._child or EngineChild(self._log, self.number, self._count, self._cluster)
        self._child = None
        try:
            self.facts = await engine.start(
                self._config, asyncio.get_running_loop(), self._deliver, self._died
            )
        except BaseException:
            engine.kill()
            raise
        self._engine, self.trouble, self._failures = engine, "", 0
        if self._timeout:
            # A hung engine that is killed is handled by `_died`, like any crash.
            watches = self._watch_replies(engine), self._watch_state(engine)
            self._watching = [asyncio.create_task(one) for one in watches]
        return self.facts

    def begin(self, *, again: bool = False) -> None:
        """Start an engine in a task that retries until it succeeds; `again` counts it as a restart."""
        self._starting = asyncio.create_task(self._start_with_retries(again))

    async def _start_with_retries(self, again: bool) -> None:
        for attempt in itertools.count(1):
            try:
                await self.start()
                break
            except Exception as error:  # no exception may end this task: works wait for it
                reason = str(error) or repr(error)
                self.trouble = f"{self.name} cannot be {'re' * again}started: {reason}"
                _LOG.error("%s", self.trouble)
                self._failures = attempt
                if attempt == _MAX_FAILED_STARTS and self._count > 1:
                    _LOG.error("%s is left out for now", self.name)
                self._on_change(self)
                await asyncio.sleep(min(2.0 ** min(attempt, 6), 60.0))
        self.restarts += again
        self._on_change(self)

    async def renew(self) -> None:
        """End the engine, which should have no works, and start another in the background."""
        engine = self._engine
        await self._read_statistics()  # takes its last statistics
        if engine is None or engine is not self._engine:
            return  # it died, and `_died` starts the next one
        self._lose(f"{self.name} is replaced")
        await engine.close()
        self.begin(again=True)

    async def close(self) -> None:
        """End the engine process."""
        self._closed = True
        for one in self._watching:
            one.cancel()
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting
        if (engine := self._engine) is not None:
            self._engine = None
            await engine.close()

    def send(self, command: str, argument: object) -> None:
        """Send a command (engine_process.py) to the engine; no effect if none runs."""
        if self._engine is not None:
            self._engine.send((command, argument))

    async def health(self) -> ReplicaHealth:
        """Current health, returned within a second even if the engine hangs.

        If the engine does not reply, the state is the last one known.
        """
        answer = await self._read_statistics()
        trouble = self.trouble or ("" if answer else f"{self.name} does not answer")
        if self.draining:
            trouble = trouble or f"{self.name} is being replaced"
        state = answer or self._state.after(self._counted)
        return ReplicaHealth(state, self.restarts, trouble)

    async def _read_statistics(self, timeout: float = _ANSWER_SECONDS) -> Statistics | None:
        """Query the statistics, summed with earlier engines'; None if no reply comes in `timeout` seconds."""
        if self._engine is None:
            return None
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self.send("ask", number)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return None
        finally:
            del self._questions[number]

    def _deliver(self, engine: EngineChild, message: tuple[Any, ...]) -> None:
        """Handle a message of an engine, on the event loop."""
        if engine is not self._engine:
            return  # a late message of a dropped engine
        kind, *content = message
        if kind == "busy":
            self._busy = frozenset(content[0])
        elif kind == "deltas":
            deltas, state = content
            self._state = state or self._state
            self._on_deltas(self, deltas)
        else:
            number, self._state = content
            if (waiting := self._questions.get(number)) is not None and not waiting.done():
                waiting.set_result(self._state.after(self._counted))

    def _died(self, engine: EngineChild) -> None:
        """Start the next engine: this one's process has ended."""
        if engine is not self._engine or self._closed:
            return
        busy = self._busy
        self._lose(f"{self.name} ended with status {engine.status} and is restarted")
        self.begin(again=True)
        self._on_lost(self, busy)

    def _lose(self, trouble: str) -> None:
        """Drop the engine, keep its counts, and fail open queries."""
        self._engine, self._busy, self.trouble = None, None, trouble
        self._counted, self._state = self._state.after(self._counted), Statistics()
        for waiting in self._questions.values():
            if not waiting.done():
                waiting.set_result(None)

    async def _watch_state(self, engine: EngineChild) -> None:
        """Kill an engine that a signal has stopped for 10 seconds, after which its other ranks end, too."""
        stopped = 0
        while engine is self._engine:
            stopped = stopped + 1 if _is_stopped(engine.pid) else 0
            if stopped > _STOPPED_SECONDS:
                _LOG.error("%s has been stopped for %d seconds and is killed", self.name, _STOPPED_SECONDS)
                engine.kill()
                return
            await asyncio.sleep(1.0)

    async def _watch_replies(self, engine: EngineChild) -> None:
        """Kill an engine that does not reply, or whose step makes no progress, for the timeout.

        Another thread than the steps' answers queries. It gets 10 of them, each with a tenth of the
        timeout: if this process itself was suspended, only one of the queries fails. A step makes no progress
        if another reply names the same step and the same number of streamed bytes.
        """
        progress, quiet = (0, 0), 0
        while True:
            answer = await self._read_statistics(self._timeout / _QUESTIONS)
            if engine is not self._engine:
                return
            if answer is None:
                quiet, trouble = quiet + 1, f"{self.name} has not replied"
            else:
                before, progress = progress, (answer.steps, answer.streamed_bytes)
                quiet = quiet + 1 if answer.step_seconds and progress == before else 0
                trouble = f"step {answer.steps} of {self.name} has made no progress"
            if quiet == _QUESTIONS:
                _LOG.error("%s for %g seconds and is killed", trouble, self._timeout)
                engine.kill()
                return
            if answer is not None:
                await asyncio.sleep(self._timeout / _QUESTIONS)


def _is_stopped(pid: int) -> bool:
    """True if a signal has stopped the process."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
