"""EngineLoop: drives an engine in its own thread, for any number of other threads.

    submit, cancel    any thread: queue a command
    the loop          commands, a step of the engine, the delivery of its deltas, and again
    stream            any thread: waits for outputs

Commands run between steps, so a cancelled request takes part in no later step.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from specinfer.engine.admission import AdmittedRequest
from specinfer.errors import ClosedError, IntegrityError, PeerLostError, RequestError, UserError
from specinfer.request import Delta, FinishReason, RequestOutput

if TYPE_CHECKING:  # importing this module does not load models
    from specinfer.engine.engine import Engine

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS: Final = 1.0  # after which the loop does what the start put off

Receiver = Callable[[Delta], object]
_LOOPS: Final[weakref.WeakSet[EngineLoop]] = weakref.WeakSet()  # that have threads; stopped at exit


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that has not ended, with the receiver of its deltas."""

    admitted: AdmittedRequest
    receive: Receiver


class EngineLoop:
    """Drives one engine; every method is callable from any thread.

    Within a step, or in a receiver, only `cancel`, `submit` and `stop` may be called; the others would wait
    for themselves and raise UserError. After `close` all methods but `close` and `cancel` raise ClosedError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        # Its `put` is reentrant: `cancel` may run in a stream's finalizer, at any line of any thread.
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._live: dict[str, _Live] = {}
        # Guards the entry of requests, and the fields below. Garbage collection may call `stop` within it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None  # started by the first command
        self._refusing = ""  # why new requests are refused
        self._lost: PeerLostError | None = None
        self._rests = False
        # Called first in the loop's thread with the exception of a step, and the ids of its requests; a
        # server ends its process.
        self.on_failed: Callable[[BaseException, Sequence[str]], object] | None = None

    def submit(self, requests: Sequence[AdmittedRequest], receive: Receiver) -> None:
        """Queue requests; `receive` gets each of their deltas, the last one with a finish reason.

        The loop's thread calls `receive` between steps, so it must be quick; an exception that it raises
        cancels the request. Raises RequestError if an id is in use, ClosedError after `close`.
        """
        with self._lock:
            self._start()
            named: dict[str, AdmittedRequest] = {}
            for one in requests:
                if (request_id := one.request.request_id) in self._live or request_id in named:
                    raise RequestError(f"request id {request_id!r} is in use; submit each request once")
                named[request_id] = one
            self._live |= {request_id: _Live(one, receive) for request_id, one in named.items()}
            self._commands.put(partial(self._add, [*named.values()]))  # one command: they share a step

    def cancel(self, requests: Iterable[AdmittedRequest]) -> None:
        """End the requests that have not ended, with finish reason "abort", before the next step."""
        for one in requests:
            self._commands.put(partial(self._abort, one))

    def stream(
        self, requests: Sequence[AdmittedRequest], *, ended_only: bool = False
    ) -> Generator[RequestOutput]:
        """Submit requests and yield their outputs after every step, until all have ended.

        With `ended_only` it yields one output per request, at its end. Closing the generator cancels the
        remaining requests. Raises as `submit` does, PeerLostError if a rank is lost, and ClosedError if the
        loop is closed meanwhile.
        """
        self._refuse_within_step()
        outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        left = {one.request.request_id: one for one in requests}

        def receive(delta: Delta) -> None:
            one = left.get(delta.id)
            if one is not None and (delta.finished or not ended_only):
                # Only while no step runs, as a step mutates the output.
                outputs.put(one.transcript.output(delta.text))

        try:
            self.submit(requests, receive)
            while left:
                output = outputs.get()
                if output.finish_reason is FinishReason.ABORT and self._refusing:
                    raise ClosedError(self._refusing)
                if output.finish_reason is FinishReason.ERROR and self._lost is not None:
                    raise PeerLostError(str(self._lost), self._lost.rank)
                if output.finished:
                    del left[output.request_id]
                yield output
        finally:
            self.cancel(left.values())

    def close(self) -> None:
        """End all requests with finish reason "abort" and release the engine; a second call does nothing.

        Waits for the running step. Threads that wait for outputs get a ClosedError.
        """
        self._refuse_within_step()
        self.stop()

    def stop(self, *, wait: bool = True) -> None:
        """Close, also from the loop's own thread, which then ends after its step.

        Garbage collection, which may come at any line of any thread, must not `wait`.
        """
        with self._lock:
            self._refusing = "the LLM was closed; make a new one"
            thread, engine = self._thread, self._engine
        if engine is not None:
            engine.close()
        if thread is None:
            self._engine = None
            return
        self._commands.put(lambda: None)  # wakes it
        if wait and thread is not threading.current_thread():
            thread.join()

    def rest_when_idle(self) -> None:
        """Let an idle loop do what the start put off, such as measuring passes."""
        with self._lock:
            self._rests = True
            self._start()
            self._commands.put(lambda: None)  # wakes it

    def rest(self) -> None:
        """Do, between two steps, the work that the start put off, such as measuring passes."""
        self._call(lambda engine: engine.rest(lambda: bool(self._refusing)))

    def check_integrity(self) -> None:
        """Raise IntegrityError, between two steps, if the engine's parts or its requests are inconsistent."""

        def check(engine: Engine) -> None:
            engine.check_integrity()
            if not self._live and engine.has_work:
                raise IntegrityError("the engine has work, but the loop has no live request")

        self._call(check)

    def _call(self, function: Callable[[Engine], None]) -> None:
        """Call a function between two steps; raises its exception."""
        self._refuse_within_step()
        done: Future[None] = Future()

        def call() -> None:
            try:
                function(self._present_engine)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            self._start()
            self._commands.put(call)
        done.result()

    def _start(self) -> None:
        """Start the thread if it does not run; the lock is taken."""
        if self._refusing:
            raise ClosedError(self._refusing)
        if self._thread is None:
            # A daemon, as the interpreter waits for other threads before it runs `atexit` handlers.
            thread = threading.Thread(target=self._run, name="specinfer-engine", daemon=True)
            thread.start()
            self._thread = thread
            _LOOPS.add(self)
        elif not self._thread.is_alive():
            raise ClosedError("the LLM was made in another process, before a fork; load the model here")

    def _refuse_within_step(self) -> None:
        if threading.current_thread() is self._thread:
            raise UserError(
                "the LLM is called within one of its own steps (by on_tree, a speculator or a receiver), "
                "which would wait for itself; call it after the step, or use another LLM"
            )

    @property
    def _present_engine(self) -> Engine:
        assert self._engine is not None, "the engine's thread has ended"
        return self._engine

    # In the loop's thread.

    def _run(self) -> None:
        try:
            self._drive(self._present_engine)
        except BaseException as error:
            _LOG.exception("the engine's thread ends; please report it")
            if self.on_failed is not None:
                self.on_failed(error, ())
        finally:
            with self._lock:
                self._refusing = self._refusing or "the engine's thread has ended; make a new LLM"
            self._engine = None
            while not self._commands.empty():
                with contextlib.suppress(Exception):  # calls get an error, as there is no engine
                    self._commands.get()()
            for live in list(self._live.values()):
                with contextlib.suppress(Exception):
                    self._receive(live.admitted.fail("the engine's thread has ended; please report it"))

    def _drive(self, engine: Engine) -> None:
        while not self._refusing:
            try:
                idle_seconds = _IDLE_SECONDS if self._rests and engine.has_postponed else None
                command = self._commands.get(not engine.has_work, idle_seconds)
            except Empty:
                if not engine.has_work:
                    engine.rest(lambda: bool(self._refusing) or not self._commands.empty())
            else:
                command()
                del command  # which holds requests
                continue
            if engine.has_work:
                self._step(engine)
        while not self._commands.empty():
            self._commands.get()()
        for live in list(self._live.values()):
            self._abort(live.admitted)

    def _step(self, engine: Engine) -> None:
        try:
            deltas = engine.step()
        except BaseException as error:  # libraries in Rust raise these
            if self.on_failed is not None:
                self.on_failed(error, engine.stepped)
            if isinstance(error, PeerLostError):
                self._lost = PeerLostError(str(error), error.rank)  # without the frames of the step
                _LOG.error("all requests end: %s", error)
            else:
                _LOG.exception("a step failed, and its requests end")
            deltas = engine.fail(error)
        for delta in deltas:
            self._receive(delta)

    def _add(self, requests: Sequence[AdmittedRequest]) -> None:
        for one in requests:
            if one.request.request_id not in self._live:
                continue  # another thread cancelled it while it was submitted
            try:
                self._present_engine.add(one)
            except Exception as error:
                self._receive(one.fail(str(error)))

    def _abort(self, one: AdmittedRequest) -> None:
        live = self._live.get(one.request.request_id)
        if live is not None and live.admitted is one:
            delta = self._present_engine.abort(one.request.request_id)
            self._receive(delta or one.fail("the request was cancelled before it began"))

    def _receive(self, delta: Delta) -> None:
        live = self._live.get(delta.id)
        if live is None:
            return  # its request was not submitted here
        if delta.finished:
            del self._live[delta.id]
        try:
            live.receive(delta)
        except Exception:
            _LOG.exception("request %s is cancelled, as its receiver failed", delta.id)
            if not delta.finished:
                self.cancel([live.admitted])


@atexit.register
def _stop_all() -> None:
    """Stop all loops before the interpreter ends."""
    for loop in list(_LOOPS):
        loop.stop()
