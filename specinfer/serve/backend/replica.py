"""Replica: one of a server's engines, in a process of its own, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.request import Delta
from specinfer.serve.backend.cluster import Cluster
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.work import EngineInfo, ReplicaHealth, Work

_LOG = logging.getLogger(__name__)
_MOST_FAILED_STARTS: Final = 3  # in a row; then nobody waits any longer
_ANSWER_SECONDS: Final = 1.0  # within which an engine that is well says how it is
_QUESTIONS: Final = 10  # in a row without an answer, after which an engine is taken for hung


class Replica:
    """Number `number` of `count` engines with one config. Its methods belong to one event loop.

    It tells of itself by what is called here: `on_deltas` with what the engine has said, `on_lost` when it
    died, with the works that it was busy with (None: it had not said), and `on_change` when an engine takes
    work, or could not be started. An engine that gives no sign of life for `timeout` seconds is killed; 0 is
    never. The first engine is that of `child`, where one is given. Engines run on `cluster`, or on this host.
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
        self.facts: EngineInfo | None = None  # of the engine that runs, or ran last
        self.draining = False  # it is to have no more works than it has
        self.restarts = 0
        self.trouble = f"{self.name} starts"  # why it takes no work
        self._config = config
        self._count = count
        self._log = log
        self._child = child
        self._cluster = cluster
        self._timeout = timeout
        self._on_deltas, self._on_lost, self._on_change = on_deltas, on_lost, on_change
        self._engine: EngineChild | None = None  # None while one starts
        self._busy: frozenset[str] | None = None  # works that the engine is busy with; None: it has not said
        self._state = Statistics()  # the engine's, as it was last told
        self._counted = Statistics()  # of the engines before it
        self._questions: dict[int, asyncio.Future[Statistics | None]] = {}
        self._numbers = itertools.count()
        self._failures = 0  # starts that failed in a row
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def serves(self) -> bool:
        """Whether an engine runs that may be given works."""
        return self._engine is not None and not self.draining

    @property
    def runs(self) -> bool:
        """Whether an engine runs."""
        return self._engine is not None

    @property
    def is_left_out(self) -> bool:
        """Whether so many starts failed that nobody waits for it; it is tried again now and then."""
        return self._engine is None and self._failures >= _MOST_FAILED_STARTS

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs; None while one starts."""
        return None if self._engine is None else self._engine.pid

    @property
    def fingerprint(self) -> str:
        """What the texts of the engine that runs, or ran last, belong to."""
        return "" if self.facts is None else self.facts.fingerprint

    @property
    def longest(self) -> int:
        """The cache positions of that engine."""
        return 0 if self.facts is None else self.facts.longest

    async def start(self) -> EngineInfo:
        """Start an engine; raises UserError with its own words where it cannot, BackendError if it dies."""
        loop = asyncio.get_running_loop()
        if (cluster := self._cluster) is not None and self._child is None:
            await asyncio.to_thread(cluster.revive)
        engine, self._child = self._child or EngineChild(self._log, self.number, self._count, cluster), None
        try:
            self.facts = await engine.start(self._config, loop, self._deliver, self._died)
        except BaseException:
            engine.kill()
            raise
        self._engine, self.trouble, self._failures = engine, "", 0
        if self._timeout:
            self._watching = loop.create_task(self._watch(engine))
        return self.facts

    def begin(self, *, again: bool = False) -> None:
        """Start an engine in a task of its own, however often that fails; `again` where another one ended."""
        self._starting = asyncio.get_running_loop().create_task(self._start_at_last(again))

    async def _start_at_last(self, again: bool) -> None:
        for attempt in itertools.count(1):
            try:
                await self.start()
                break
            except Exception as error:  # whatever it is: others wait for this task
                reason = str(error) or repr(error)
                self.trouble = f"{self.name} cannot be started{' again' * again}: {reason}"
                _LOG.error("%s", self.trouble)
                self._failures = attempt
                if attempt == _MOST_FAILED_STARTS and self._count > 1:
                    _LOG.error("%s is left out for now", self.name)
                self._on_change(self)
                await asyncio.sleep(min(2.0 ** min(attempt, 6), 60.0))
        self.restarts += again
        self._on_change(self)

    async def renew(self) -> None:
        """End the engine, which should have no works, and begin to start another."""
        engine = self._engine
        await self._ask()  # what it counted
        if engine is None or engine is not self._engine:
            return  # it died, and the next one is started
        self._lose(f"{self.name} is replaced")
        await engine.close()
        self.begin(again=True)

    async def close(self) -> None:
        """End the engine process."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting
        if (engine := self._engine) is not None:
            self._engine = None
            await engine.close()

    def add(self, works: Sequence[Work]) -> None:
        """Give works to the engine, which has to run."""
        self._send("add", works)

    def abort(self, names: Sequence[str]) -> None:
        """Have the engine, where one runs, end these works before its next step."""
        self._send("abort", names)

    def _send(self, command: str, argument: object) -> None:
        if self._engine is not None:
            self._engine.send((command, argument))

    async def health(self) -> ReplicaHealth:
        """How it is now; answers within a second, whatever happened to its engine.

        Where that does not answer, the state is what it told last.
        """
        answer = await self._ask()
        trouble = self.trouble or ("" if answer else f"{self.name} does not answer")
        if self.draining:
            trouble = trouble or f"{self.name} is about to be replaced"
        state = answer or self._state.after(self._counted)
        return ReplicaHealth(state, self.restarts, trouble, runs=self.runs, answers=answer is not None)

    async def _ask(self, timeout: float = _ANSWER_SECONDS) -> Statistics | None:
        """The engine's state; None where it does not answer in time."""
        if self._engine is None:
            return None
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send("ask", number)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return None
        finally:
            del self._questions[number]

    def _deliver(self, engine: EngineChild, message: tuple[Any, ...]) -> None:
        """A message of an engine, on the event loop."""
        if engine is not self._engine:
            return  # of one that was given up
        kind, *said = message
        if kind == "busy":
            self._busy = frozenset(said[0])
        elif kind == "deltas":
            deltas, state = said
            self._state = state or self._state
            self._on_deltas(self, deltas)
        else:
            number, self._state = said
            if (waiting := self._questions.get(number)) is not None and not waiting.done():
                waiting.set_result(self._state.after(self._counted))

    def _died(self, engine: EngineChild) -> None:
        """The engine's process has ended."""
        if engine is not self._engine or self._closed:
            return
        busy = self._busy
        self._lose(f"{self.name} ended with status {engine.status} and is started again")
        self.begin(again=True)
        self._on_lost(self, busy)

    def _lose(self, trouble: str) -> None:
        """No engine runs now, and what the last one counted is kept."""
        self._engine, self._busy, self.trouble = None, None, trouble
        self._counted, self._state = self._state.after(self._counted), Statistics()
        for waiting in self._questions.values():
            if not waiting.done():
                waiting.set_result(None)

    async def _watch(self, engine: EngineChild) -> None:
        """Kill an engine that gives no sign of life; that is a death as any other.

        It answers within a step, however long that takes. It is asked several times, each for a part of the
        time: where this process was stopped itself, only one of the questions is in vain.
        """
        while engine is self._engine:
            for _ in range(_QUESTIONS):
                answer = await self._ask(self._timeout / _QUESTIONS)
                if answer is not None or engine is not self._engine:
                    break
            else:
                seconds = f"{self._timeout:g} seconds"
                _LOG.error("%s has given no sign of life for %s and is killed", self.name, seconds)
                engine.kill()
                return
            await asyncio.sleep(self._timeout / _QUESTIONS)
