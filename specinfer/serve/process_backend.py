"""ProcessBackend: an engine in a process of its own, started again when it dies.

The server keeps of every answer the prompt, the parameters with their seed, and the tokens it has got. So
when the engine dies, the next one goes on behind these tokens: under the coupled rule the text is a function
of target, prompt and seed, hence the very text it would have been; no token comes twice, none is lost. Under
multi-step sampling only the law would hold, and such an answer ends with the reason.

An engine says which works it is busy with before it is; those it was busy with when it died may be why. Once
a work was there at two deaths, with no token between, works go to the next engine one by one, each when the
one before it has got a token: the third death tells whose fault it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.request import Delta
from specinfer.serve.engine_child import EngineChild
from specinfer.serve.work import BackendError, EngineInfo, Health, UnavailableError, Work

_LOG = logging.getLogger(__name__)
_MOST_DEATHS: Final = 3  # while the engine was busy with a work, without a token between: it is the cause
_MOST_FAILED_STARTS: Final = 3  # in a row; then nobody waits any longer
_ANSWER_SECONDS: Final = 1.0  # within which an engine that is well says how it is
_QUESTIONS: Final = 10  # in a row without an answer, after which an engine is taken for hung


@dataclass(eq=False)
class _Reader:
    """Whoever waits for some works, and what they have not read yet."""

    pending: dict[str, list[Delta]] = field(default_factory=dict)  # by the work's id
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BackendError | None = None
    begun: bool = False  # whether the first step of one of them has begun

    def put(self, delta: Delta) -> None:
        """Hand over a delta."""
        self.pending.setdefault(delta.id, []).append(delta)
        self.begun = self.begun or delta.begun or not delta.is_empty
        self.arrived.set()

    def fail(self, failure: BackendError) -> None:
        """End all of it."""
        self.failure = failure
        self.arrived.set()


@dataclass(eq=False)
class _OpenWork:
    """A work that has not ended."""

    work: Work
    reader: _Reader
    said: list[int] = field(default_factory=list)  # the output tokens so far
    deaths: int = 0  # of engines that were busy with it, since its last token
    held: bool = False  # until those before it were tried

    @property
    def rest(self) -> Work:
        """What is left of the work, for an engine that has not begun it."""
        return replace(self.work, said=tuple(self.said))


class ProcessBackend:
    """Makes tokens for the server with `python -m specinfer.serve.engine_process`.

    All methods belong to one event loop. `start` returns when the engine takes work; `close` ends it. The
    first engine is that of `child`, where one is given; `log` is the level and the form of engines' logs.
    Requests of which nothing has been computed after `max_wait` seconds fail, and an engine that gives no
    sign of life for `timeout` seconds is killed; 0 is never, of both.
    """

    def __init__(
        self,
        config: EngineConfig,
        log: tuple[str, str] = ("info", "text"),
        child: EngineChild | None = None,
        *,
        max_wait: float = 0.0,
        timeout: float = 0.0,
    ) -> None:
        self._config = config
        self._log = log
        self._child = child
        self._max_wait = max_wait
        self._timeout = timeout
        self._watching: asyncio.Task[None] | None = None
        self._live: dict[str, _OpenWork] = {}
        self._engine: EngineChild | None = None  # None while one starts
        self._busy: frozenset[str] | None = None  # works that the engine is busy with; None: it has not said
        self._trial: _OpenWork | None = None  # while works go to the engine one by one, the last that did
        self._state = Statistics()  # the engine's, as it was last told
        self._counted = Statistics()  # of the engines before it
        self._questions: dict[int, asyncio.Future[Statistics | None]] = {}
        self._numbers = itertools.count()
        self._restarting: asyncio.Task[None] | None = None
        self._trouble = "the engine starts"
        self._closed = False
        self.restarts = 0

    async def start(self) -> EngineInfo:
        """Start the engine; raises UserError with its own words where it cannot start."""
        engine, self._child = self._child or EngineChild(self._log), None
        loop = asyncio.get_running_loop()
        try:
            facts = await engine.start(self._config, loop, self._deliver, self._died)
        except BaseException:
            engine.kill()
            raise
        self._engine, self._trouble = engine, ""
        if self._timeout:
            self._watching = loop.create_task(self._watch(engine))
        return facts

    async def close(self) -> None:
        """End the engine process; answers in progress fail."""
        self._closed = True
        self._trouble = "the server is closing"
        if self._watching is not None:
            self._watching.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        self.cut(self._trouble)
        self._live.clear()
        if (engine := self._engine) is not None:
            self._engine = None
            await engine.close()

    def cut(self, reason: str) -> int:
        """End all answers with UnavailableError, which says why; returns how many there were."""
        for live in self._live.values():
            live.reader.fail(UnavailableError(reason))
        return len(self._live)

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs; None while one starts."""
        return None if self._engine is None else self._engine.pid

    async def generate(self, works: Sequence[Work]) -> AsyncGenerator[Delta]:
        """The deltas of these works as they come, each one's last with a finish reason.

        Some say nothing: the first, when the work is admitted, and one when its first step begins. Of a
        reader that is slow, deltas of one work are put together. A generator that is closed aborts what is
        left. Raises BackendError when an answer cannot go on.
        """
        if self._closed:
            raise BackendError(self._trouble)
        reader = _Reader()
        left = {work.id for work in works}
        held = self._trial is not None
        for work in works:
            self._live[work.id] = _OpenWork(work, reader, held=held)
        if not held:
            self._send("add", works)
        timer = None
        if self._max_wait:
            timer = asyncio.get_running_loop().call_later(self._max_wait, self._expire, reader)
        try:
            while left:
                await reader.arrived.wait()
                if reader.failure and not reader.pending:
                    raise reader.failure
                pending, reader.pending = reader.pending, {}
                if not reader.failure:
                    reader.arrived.clear()
                for deltas in pending.values():
                    delta = Delta.joined(deltas)
                    if delta.finish_reason is not None:
                        left.discard(delta.id)
                    yield delta
        finally:
            if timer is not None:
                timer.cancel()
            self.abort(left)

    def _expire(self, reader: _Reader) -> None:
        if not reader.begun:
            reader.fail(
                UnavailableError(
                    f"the request has waited for {self._max_wait:g} seconds, --max-wait, and others are "
                    "still before it; come again"
                )
            )

    def abort(self, ids: Iterable[str]) -> None:
        """End these works before the next step; nobody hears of them again."""
        gone = [name for name in ids if self._live.pop(name, None) is not None]
        if gone:
            self._send("abort", gone)
            if self._trial is not None and self._trial.work.id in gone:
                self._try_next()

    async def health(self) -> Health:
        """How the engine is now; answers within a second, whatever happened to it."""
        state = await self._ask()
        trouble = self._trouble or ("the engine does not answer" if state is None else "")
        if self._engine is None:  # nothing runs, and all wait for the next engine
            state = Statistics(waiting=len(self._live)).after(self._counted)
        return Health(state, self.restarts, trouble)

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

    def _send(self, command: str, argument: object) -> None:
        if self._engine is not None:  # else the next engine is told of all that live when it is ready
            self._engine.send((command, argument))

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
            self._hand_on(deltas)
        else:
            number, self._state = said
            if (waiting := self._questions.get(number)) is not None and not waiting.done():
                waiting.set_result(self._state.after(self._counted))

    def _hand_on(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            live = self._live.get(delta.id)
            if live is None:
                continue  # nobody waits for it any more
            if delta.finish_reason is not None:
                del self._live[delta.id]
            elif delta.token_ids:
                live.said.extend(delta.token_ids)
                live.deaths = 0
                if delta.prompt_logprobs is not None:  # another engine need not compute them again
                    live.work = replace(live.work, params=replace(live.work.params, prompt_logprobs=None))
            live.reader.put(delta)
            if live is self._trial and (delta.finish_reason is not None or delta.token_ids):
                self._try_next()

    def _died(self, engine: EngineChild) -> None:
        """The engine's process has ended."""
        if engine is not self._engine or self._closed:
            return
        self._engine = None
        self._trouble = f"the engine ended with status {engine.status} and is started again"
        _LOG.error("%s; %d answers wait for it", self._trouble, len(self._live))
        for waiting in self._questions.values():
            if not waiting.done():
                waiting.set_result(None)
        self._counted, self._state = self._state.after(self._counted), Statistics()
        busy, self._busy, self._trial = self._busy, None, None
        for live in list(self._live.values()):
            live.deaths += live.work.id in busy if busy is not None else not live.held
            live.held = False
            if live.deaths >= _MOST_DEATHS:
                self._give_up(live, f"the engine died {live.deaths} times in a row while it had this request")
            elif live.said and not goes_on(live.work, self._config):
                self._give_up(live, "the engine died; under mss a text that has begun cannot go on as it was")
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    def _give_up(self, live: _OpenWork, reason: str) -> None:
        del self._live[live.work.id]
        live.reader.fail(BackendError(reason))

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
                _LOG.error("the engine has given no sign of life for %g seconds and is killed", self._timeout)
                engine.kill()
                return
            await asyncio.sleep(self._timeout / _QUESTIONS)

    async def _restart(self) -> None:
        for attempt in itertools.count(1):
            try:
                await self.start()
                break
            except Exception as error:  # whatever it is: others wait for this task
                reason = str(error) or repr(error)
                _LOG.error("the engine cannot be started again: %s", reason)
                self._trouble = f"the engine cannot be started again: {reason}"
                if attempt >= _MOST_FAILED_STARTS:
                    for live in list(self._live.values()):
                        self._give_up(live, self._trouble)
                await asyncio.sleep(min(2.0 ** min(attempt, 6), 60.0))
        self.restarts += 1
        _LOG.warning("the engine was started again; %d answers go on", len(self._live))
        if any(live.deaths == _MOST_DEATHS - 1 for live in self._live.values()):
            # Where one more death would end a work, nobody is beside it who may be why: all go one by one.
            for live in self._live.values():
                live.held = True
            self._try_next()
        elif self._live:
            self._send("add", [live.rest for live in self._live.values()])

    def _try_next(self) -> None:
        """Give the engine the next work that is held: the one before it has ended, or has got a token."""
        self._trial = next((live for live in self._live.values() if live.held), None)
        if self._trial is not None:
            self._trial.held = False
            self._send("add", [self._trial.rest])


def goes_on(work: Work, config: EngineConfig) -> bool:
    """Whether another engine makes the very text that this work has begun."""
    verifier = work.params.speculation.verifier or config.speculation.verifier
    return work.params.greedy or verifier == "coupled"
