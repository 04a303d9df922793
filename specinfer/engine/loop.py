"""EngineLoop: drives an engine for any number of threads.

    submit, cancel      any thread: queue a command
    a turn              one thread at a time: commands, a step of the engine, and the delivery of deltas
    wait_until, stream  any thread: wait; a waiting thread takes a free turn

Without a thread of its own the loop is driven by the threads that wait for it, one at a time. After `start`
its own thread drives it, and the others only wait. Commands run between steps, so a cancelled request takes
part in no later step.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from specinfer.engine.admission import AdmittedRequest
from specinfer.errors import ClosedError, IntegrityError, PeerLostError, RequestError, UserError
from specinfer.request import Delta, FinishReason, RequestOutput

if TYPE_CHECKING:  # importing this module does not load models
    from specinfer.engine.engine import Engine

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS: Final = 1.0  # after which a loop's own thread does what the start put off
MAX_FAILURES: Final = 3  # consecutive failed steps before a loop's own thread ends all requests

Receiver = Callable[[Delta], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """The right to call the engine, held by one thread at a time."""

    thread: int


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that has not ended, with the receiver of its deltas."""

    admitted: AdmittedRequest
    receive: Receiver


class EngineLoop:
    """Drives one engine; every method is callable from any thread.

    Within a step, or in a receiver, only `cancel` and `submit` may be called; the others would wait for
    themselves and raise UserError. After `close` all methods but `close` and `cancel` raise ClosedError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        # A deque without a lock: `cancel` may run in a stream's finalizer, at any line of any thread.
        self._commands: deque[Callable[[], None]] = deque()
        self._undelivered: deque[Delta] = deque()  # made by steps, not delivered yet
        self._live: dict[str, _Live] = {}
        self._changed = threading.Condition()  # guards the fields above and the three below
        self._turn: _Turn | None = None
        self._thread: threading.Thread | None = None
        self._refusing = ""  # why new requests are refused
        self._closed = False
        self.on_lost: Callable[[PeerLostError], object] | None = None  # called first; see `start`

    def submit(self, requests: Sequence[AdmittedRequest], receive: Receiver) -> None:
        """Queue requests; `receive` gets each of their deltas, the last one with a finish reason.

        The driving thread calls `receive` between steps, so it must be quick; an exception that it raises
        cancels the request. An interrupt of that thread may deliver a delta twice. Raises RequestError if an
        id is in use, ClosedError after `close`.
        """
        with self._changed:
            if self._refusing:
                raise ClosedError(self._refusing)
            named: dict[str, AdmittedRequest] = {}
            for one in requests:
                if (request_id := one.request.request_id) in self._live or request_id in named:
                    raise RequestError(f"request id {request_id!r} is in use; submit each request once")
                named[request_id] = one
            for request_id, one in named.items():
                self._live[request_id] = _Live(one, receive)
                self._commands.append(partial(self._add, one))
            self._changed.notify_all()

    def cancel(self, requests: Iterable[AdmittedRequest]) -> None:
        """End the requests that have not ended, with finish reason "abort", before the next step."""
        commands = [partial(self._abort, one) for one in requests]
        if commands:
            self._commands.extend(commands)
            self._run_commands_now()

    def stream(
        self, requests: Sequence[AdmittedRequest], *, ended_only: bool = False
    ) -> Generator[RequestOutput]:
        """Submit requests and yield their outputs after every step, until all have ended.

        With `ended_only` it yields one output per request, at its end. Closing the generator cancels the
        remaining requests. Raises as `submit` does, what a step raises in this thread, and ClosedError if the
        loop is closed meanwhile.
        """
        inbox: deque[tuple[Delta, RequestOutput]] = deque()
        left = {one.request.request_id: one for one in requests}
        last: Delta | None = None

        def receive(delta: Delta) -> None:
            one = left.get(delta.id)
            if one is not None and (delta.finished or not ended_only):
                # Only while no step runs, as a step mutates the output.
                inbox.append((delta, one.transcript.output(delta.text)))

        try:
            self.submit(requests, receive)
            while left:
                self.wait_until(lambda: inbox)
                delta, output = inbox.popleft()
                if delta is last:
                    continue  # delivered twice because of an interrupt
                if self._closed and output.finish_reason is FinishReason.ABORT:
                    raise ClosedError(self._refusing)
                last = delta
                if output.finished:
                    del left[output.request_id]
                yield output
        finally:
            self.cancel(left.values())

    def wait_until(self, done: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until `done()` is true, driving the loop if no other thread does.

        `done` is called before each step and must be quick. Returns False after `timeout` seconds; a running
        step is finished first. Raises what a step raises in this thread, ClosedError if the loop is closed,
        and IntegrityError if no request is left to wait for.
        """
        until = None if timeout is None else time.monotonic() + timeout
        return self._wait(done, until, step=True)

    def start(self) -> None:
        """Start a thread that drives the loop until `close` or the interpreter's exit.

        A step that raises there is logged and tried again; after three consecutive failures all requests end
        with finish reason "error". If a rank is lost, `on_lost` is called and all requests end at once.
        Raises ClosedError after `close`.
        """
        with self._changed:
            if self._closed:
                raise ClosedError(self._refusing)
            if self._thread is None:
                # A daemon, as the interpreter waits for other threads before it runs `atexit` handlers.
                self._thread = threading.Thread(target=self._run, name="specinfer-engine", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def close(self) -> None:
        """End all requests with finish reason "abort" and release the engine; a second call does nothing.

        Waits for the running step. Threads that wait for outputs get a ClosedError.
        """
        with self._changed:
            self._refuse_within_step()
            self._closed = True
            self._refusing = "the LLM was closed; make a new one"
            self._changed.notify_all()
        if (engine := self._engine) is not None:
            engine.close()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)
        turn = _Turn(threading.get_ident())
        try:
            with self._changed:
                while self._turn is not None:
                    self._changed.wait()
                self._turn = turn
            if self._engine is not None:
                self._run_commands()
                for live in list(self._live.values()):
                    self._abort(live.admitted)
                self._engine = None
        finally:
            if self._turn is turn:
                self._turn = None
                self._after_turn()

    def rest(self) -> None:
        """Do, between two steps, the work that the start put off, such as measuring passes."""
        self._commands.append(lambda: self._present_engine.rest(lambda: False))
        self.check_integrity()  # returns after the command

    def check_integrity(self) -> None:
        """Raise IntegrityError, between two steps, if the engine's parts or its requests are inconsistent."""
        outcome: list[Exception | None] = []

        def check() -> None:
            try:
                self._present_engine.check_integrity()
                if not self._live and self._present_engine.has_work:
                    raise IntegrityError("the engine has work, but the loop has no live request")
                outcome.append(None)
            except Exception as error:
                outcome.append(error)

        self._commands.append(check)
        self._run_commands_now()
        self._wait(lambda: outcome, None, step=False)
        if outcome[0] is not None:
            raise outcome[0]

    @property
    def _present_engine(self) -> Engine:
        assert self._engine is not None, "a closed loop has no turns"
        return self._engine

    # Waiting, and taking the turn. A turn is taken within a `try` whose `finally` releases it before any
    # call: an interrupt can only occur at a call, so the turn is always released.

    def _wait(self, done: Callable[[], object], until: float | None, *, step: bool) -> bool:
        while True:
            turn = _Turn(threading.get_ident())
            try:
                with self._changed:
                    while not done():
                        self._refuse_within_step()
                        if self._closed:
                            raise ClosedError(self._refusing)
                        left = None if until is None else until - time.monotonic()
                        if left is not None and left <= 0:
                            return False
                        if self._turn is None and not (self._live or self._commands or self._undelivered):
                            raise IntegrityError("a thread waits for the loop, which has no request left")
                        if self._turn is None and self._thread is None:
                            self._turn = turn
                            break
                        self._changed.wait(left)
                    else:
                        return True
                self._drive(step=step)
            finally:
                if self._turn is turn:
                    self._turn = None
                    self._after_turn()

    def _run_commands_now(self) -> None:
        """Run commands at once, or leave them to the thread that has the turn."""
        turn = _Turn(threading.get_ident())
        try:
            with self._changed:
                if self._turn is None and self._thread is None and not self._closed:
                    self._turn = turn
                self._changed.notify_all()
            if self._turn is turn:
                self._run_commands()
        finally:
            if self._turn is turn:
                self._turn = None
                self._after_turn()

    def _after_turn(self) -> None:
        """After a turn, wake waiting threads and run new commands."""
        with self._changed:
            self._changed.notify_all()
        if self._commands and self._thread is None and not self._closed:
            self._run_commands_now()

    def _refuse_within_step(self) -> None:
        if self._turn is not None and self._turn.thread == threading.get_ident():
            raise UserError(
                "the LLM is called within one of its own steps (by on_tree, a speculator or a receiver), "
                "which would wait for itself; call it after the step, or use another LLM"
            )

    def _run(self) -> None:
        """The loop's own thread."""
        turn = _Turn(threading.get_ident())
        failed = 0
        while True:
            try:
                with self._changed:
                    idle = False
                    while not (self._closed or idle or self._may_run()):
                        rests = self._present_engine.has_postponed
                        idle = not self._changed.wait(_IDLE_SECONDS if rests else None)
                    if self._closed:
                        return
                    self._turn = turn
                if idle:
                    self._present_engine.rest(lambda: self._closed or bool(self._commands))
                else:
                    self._drive(step=True)
                failed = 0
            except PeerLostError as error:
                if self.on_lost is not None:
                    self.on_lost(error)
                _LOG.error("all requests end: %s", error)
                self._abort_all(str(error))
            except BaseException as error:  # any exception, as other threads wait for this one
                failed += 1
                _LOG.exception("step failed, %d in a row", failed)
                if failed == MAX_FAILURES:
                    failed = 0
                    self._abort_all(f"{MAX_FAILURES} steps of the engine failed: {error!r}")
            finally:
                if self._turn is turn:
                    self._turn = None
                    self._after_turn()

    def _abort_all(self, reason: str) -> None:
        for live in list(self._live.values()):
            self._abort(live.admitted, reason)

    def _may_run(self) -> bool:
        return self._turn is None and bool(self._live or self._commands or self._undelivered)

    # Within the turn.

    def _drive(self, *, step: bool) -> None:
        self._run_commands()
        self._deliver()  # deltas left by an interrupt
        if not step:
            return
        if self._present_engine.has_work:
            self._undelivered.extend(self._present_engine.step())
        self._deliver()
        with self._changed:  # otherwise a request submitted now would look lost
            idle = not self._present_engine.has_work and not self._commands
            lost = list(self._live.values()) if idle else []
        for live in lost:
            self._receive(live.admitted.fail("the engine lost the request; please report it"))

    def _run_commands(self) -> None:
        while self._commands:
            self._commands[0]()
            self._commands.popleft()  # only now, so that an interrupt loses no command

    def _deliver(self) -> None:
        while self._undelivered:
            self._receive(self._undelivered[0])
            self._undelivered.popleft()  # only now, likewise; `stream` drops repeated deltas

    def _add(self, one: AdmittedRequest) -> None:
        if not self._is_live(one):
            return
        try:
            self._present_engine.add(one)
        except Exception as error:
            self._undelivered.append(one.fail(str(error)))
            self._deliver()

    def _abort(self, one: AdmittedRequest, error: str = "") -> None:
        """End a request with finish reason "error" if an error is given, else "abort"."""
        self._deliver()  # its last delta may be among them
        if not self._is_live(one):
            return
        request_id = one.request.request_id
        try:
            delta = self._present_engine.abort(request_id)
        except Exception as failure:
            _LOG.exception("request %s could not be cancelled", request_id)
            delta, error = None, error or str(failure)
        if delta is None or error:
            last = one.fail(error or "the engine lost the request; please report it")
            delta = last if delta is None else Delta.joined([delta, last])
        self._undelivered.append(delta)
        self._deliver()

    def _is_live(self, one: AdmittedRequest) -> bool:
        live = self._live.get(one.request.request_id)
        return live is not None and live.admitted is one

    def _receive(self, delta: Delta) -> None:
        live = self._live.get(delta.id)
        if live is None:
            return  # its request was not submitted here
        try:
            live.receive(delta)
        except Exception:
            _LOG.exception("request %s is cancelled, as its receiver failed", delta.id)
            if not delta.finished:
                self._commands.append(partial(self._abort, live.admitted))
        if delta.finished:
            del self._live[delta.id]
