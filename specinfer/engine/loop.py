"""EngineLoop: the only caller of an engine, for any number of threads.

    submit, cancel      any thread: a command in the queue
    a turn              one thread at a time: the commands, a step of the engine, every delta to its receiver
    wait_until, stream  any thread: wait; whoever finds the turn free takes it

So without a thread of its own the loop is driven by those who wait for it, one at a time; `start` gives it
a thread, and then the others only wait. Commands are carried out between steps, so a request that is
cancelled takes part in no step that begins later.
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

from specinfer.engine.admission import Admitted
from specinfer.errors import ClosedError, IntegrityError, PeerLostError, RequestError, UserError
from specinfer.request import Delta, FinishReason, RequestOutput

if TYPE_CHECKING:  # who only waits for a loop loads no models
    from specinfer.engine.engine import Engine

_LOG = logging.getLogger(__name__)
PATIENCE: Final = 3  # steps that fail one after the other before a loop's own thread gives the requests up

Receiver = Callable[[Delta], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """Who may call the engine now."""

    thread: int


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that has not ended, and who gets its deltas."""

    admitted: Admitted
    receive: Receiver


class EngineLoop:
    """Drives one engine. Every method may be called by any thread, by several at once.

    Only `cancel` and `submit` may also be called from within a step or by a receiver; the others raise
    UserError there, for they would wait for themselves. After `close` all but `close` and `cancel` raise
    ClosedError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        # A plain deque: `cancel` may run in the finalizer of a stream, at any line of any thread.
        self._commands: deque[Callable[[], None]] = deque()
        self._made: deque[Delta] = deque()  # by steps, and not yet received
        self._live: dict[str, _Live] = {}
        self._changed = threading.Condition()  # guards what is above, and the three below
        self._turn: _Turn | None = None
        self._thread: threading.Thread | None = None
        self._refusing = ""  # why no request is taken any more
        self._closed = False
        self.on_lost: Callable[[PeerLostError], object] | None = None  # told before anybody else; see `start`

    def submit(self, requests: Sequence[Admitted], receive: Receiver) -> None:
        """Queue requests; `receive` gets each delta of theirs, the last one with a finish reason.

        It is called between steps by whoever drives the loop, so it has to be quick; when it raises, the
        request is cancelled. An interrupt of the thread that drives may make it get a delta twice. Raises
        RequestError when an id is in use, ClosedError when draining or closed.
        """
        with self._changed:
            if self._refusing:
                raise ClosedError(self._refusing)
            named: dict[str, Admitted] = {}
            for one in requests:
                if (request_id := one.request.request_id) in self._live or request_id in named:
                    raise RequestError(f"request id {request_id!r} is in use; submit each request once")
                named[request_id] = one
            for request_id, one in named.items():
                self._live[request_id] = _Live(one, receive)
                self._commands.append(partial(self._add, one))
            self._changed.notify_all()

    def cancel(self, requests: Iterable[Admitted]) -> None:
        """End those of the requests that have not ended, with finish reason "abort", before the next step."""
        commands = [partial(self._abort, one) for one in requests]
        if commands:
            self._commands.extend(commands)
            self._carry_out_now()

    def stream(self, requests: Sequence[Admitted], *, ended_only: bool = False) -> Generator[RequestOutput]:
        """Submit requests and yield their outputs as they come, until all have ended.

        With `ended_only` one output of each, when it has ended: none is made in the steps before. A caller
        that stops listening cancels what is left of them. Raises what `submit` raises, what a step raises
        that this thread runs, and ClosedError when the loop is closed meanwhile.
        """
        inbox: deque[tuple[Delta, RequestOutput]] = deque()
        left = {one.request.request_id: one for one in requests}
        last: Delta | None = None

        def receive(delta: Delta) -> None:
            one = left.get(delta.id)
            if one is not None and (delta.finished or not ended_only):
                # While no step runs: a step changes what it looks at.
                inbox.append((delta, one.transcript.output(delta.text)))

        try:
            self.submit(requests, receive)
            while left:
                self.wait_until(lambda: inbox)
                delta, output = inbox.popleft()
                if delta is last:
                    continue  # an interrupt came before it was crossed out, so it was handed out twice
                if self._closed and output.finish_reason is FinishReason.ABORT:
                    raise ClosedError(self._refusing)
                last = delta
                if output.finished:
                    del left[output.request_id]
                yield output
        finally:
            self.cancel(left.values())

    def wait_until(self, done: Callable[[], object], timeout: float | None = None) -> bool:
        """Return when `done()` holds, driving the loop meanwhile where nobody else does.

        `done` is asked before each step and must be quick. False after `timeout` seconds, in which a step
        that has begun is finished. Raises what a step raises that this thread runs, ClosedError when the
        loop is closed first, IntegrityError when there is nothing left that could be waited for.
        """
        until = None if timeout is None else time.monotonic() + timeout
        return self._wait(done, until, step=True)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and finish those that are there; False when `timeout` seconds are over."""
        with self._changed:
            self._refuse_within_step()
            self._refusing = self._refusing or "the engine is finishing its last requests; make a new LLM"
        return self.wait_until(lambda: not self._live, timeout)

    def start(self) -> None:
        """Let a thread of the loop's own drive it from now on, until `close` or the interpreter's exit.

        A step that raises there is logged and tried again; after three in a row every request that has not
        ended ends with finish reason "error". So they do at once where a rank of the model is lost, which
        `on_lost` is told before. Raises ClosedError after `close`.
        """
        with self._changed:
            if self._closed:
                raise ClosedError(self._refusing)
            if self._thread is None:
                # A daemon, or the interpreter would wait for it before it runs what `atexit` knows of.
                self._thread = threading.Thread(target=self._run, name="specinfer-engine", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def close(self) -> None:
        """End every request with finish reason "abort" and let go of the engine; once more does nothing.

        Waits for the step that is running. Whoever waits for outputs gets a ClosedError.
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
                self._carry_out()
                for live in list(self._live.values()):
                    self._abort(live.admitted)
                self._engine = None
        finally:
            if self._turn is turn:
                self._turn = None
                self._left()

    def check_integrity(self) -> None:
        """Raise, between two steps, when the engine's parts disagree, or the requests it has are not ours."""
        asked: list[Exception | None] = []

        def ask() -> None:
            try:
                self._here.check_integrity()
                if not self._live and self._here.has_work:
                    raise IntegrityError("the engine has work, and no request is left that wants it")
                asked.append(None)
            except Exception as error:
                asked.append(error)

        self._commands.append(ask)
        self._carry_out_now()
        self._wait(lambda: asked, None, step=False)
        if asked[0] is not None:
            raise asked[0]

    @property
    def _here(self) -> Engine:
        assert self._engine is not None, "nobody takes the turn of a closed loop"
        return self._engine

    # Waiting, and taking the turn. It is taken within a `try`, whose `finally` calls nothing before it has
    # given it up, not even the lock: an interrupt comes with a call, so a turn is never left behind.

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
                        if self._turn is None and not (self._live or self._commands or self._made):
                            raise IntegrityError("the loop has no request left, and somebody waits for one")
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
                    self._left()

    def _carry_out_now(self) -> None:
        """Carry commands out at once; where somebody has the turn, that is left to them."""
        turn = _Turn(threading.get_ident())
        try:
            with self._changed:
                if self._turn is None and self._thread is None and not self._closed:
                    self._turn = turn
                self._changed.notify_all()
            if self._turn is turn:
                self._carry_out()
        finally:
            if self._turn is turn:
                self._turn = None
                self._left()

    def _left(self) -> None:
        """After a turn: wake whoever waits, and carry out what was asked meanwhile."""
        with self._changed:
            self._changed.notify_all()
        if self._commands and self._thread is None and not self._closed:
            self._carry_out_now()

    def _refuse_within_step(self) -> None:
        if self._turn is not None and self._turn.thread == threading.get_ident():
            raise UserError(
                "the LLM is asked from within one of its own steps (by on_tree, a speculator or a receiver), "
                "which would wait for itself; ask after the step, or another LLM"
            )

    def _run(self) -> None:
        """The loop's own thread."""
        turn = _Turn(threading.get_ident())
        failed = 0
        while True:
            try:
                with self._changed:
                    while not self._closed and not self._may_run():
                        self._changed.wait()
                    if self._closed:
                        return
                    self._turn = turn
                self._drive(step=True)
                failed = 0
            except PeerLostError as error:
                if self.on_lost is not None:
                    self.on_lost(error)
                _LOG.error("all requests end: %s", error)
                self._abort_all(str(error))
            except BaseException as error:  # whatever it is, others wait for this thread
                failed += 1
                _LOG.exception("step failed, %d in a row", failed)
                if failed == PATIENCE:
                    failed = 0
                    self._abort_all(f"{PATIENCE} steps of the engine failed: {error!r}")
            finally:
                if self._turn is turn:
                    self._turn = None
                    self._left()

    def _abort_all(self, reason: str) -> None:
        for live in list(self._live.values()):
            self._abort(live.admitted, reason)

    def _may_run(self) -> bool:
        return self._turn is None and bool(self._live or self._commands or self._made)

    # Within the turn.

    def _drive(self, *, step: bool) -> None:
        self._carry_out()
        self._hand_out()  # what an interrupt left behind
        if not step:
            return
        if self._here.has_work:
            self._made.extend(self._here.step())
        self._hand_out()
        with self._changed:  # or a request that is submitted just now would look like a lost one
            idle = not self._here.has_work and not self._commands
            lost = list(self._live.values()) if idle else []
        for live in lost:
            self._receive(live.admitted.fail("the engine lost the request; please report it"))

    def _carry_out(self) -> None:
        while self._commands:
            self._commands[0]()
            self._commands.popleft()  # not before: an interrupt must not lose a command

    def _hand_out(self) -> None:
        while self._made:
            self._receive(self._made[0])
            self._made.popleft()  # not before, as above; `stream` drops what comes twice

    def _add(self, one: Admitted) -> None:
        if not self._is_live(one):
            return
        try:
            self._here.add(one)
        except Exception as error:
            self._made.append(one.fail(str(error)))
            self._hand_out()

    def _abort(self, one: Admitted, error: str = "") -> None:
        """End a request, with finish reason "error" where one is given, else "abort"."""
        self._hand_out()  # its last delta may be among them
        if not self._is_live(one):
            return
        request_id = one.request.request_id
        try:
            delta = self._here.abort(request_id)
        except Exception as failure:
            _LOG.exception("request %s could not be cancelled", request_id)
            delta, error = None, error or str(failure)
        if delta is None or error:
            last = one.fail(error or "the engine lost the request; please report it")
            delta = last if delta is None else Delta.joined([delta, last])
        self._made.append(delta)
        self._hand_out()

    def _is_live(self, one: Admitted) -> bool:
        live = self._live.get(one.request.request_id)
        return live is not None and live.admitted is one

    def _receive(self, delta: Delta) -> None:
        live = self._live.get(delta.id)
        if live is None:
            return  # of nobody who submitted it here
        try:
            live.receive(delta)
        except Exception:
            _LOG.exception("request %s is cancelled, as its receiver failed", delta.id)
            if not delta.finished:
                self._commands.append(partial(self._abort, live.admitted))
        if delta.finished:
            del self._live[delta.id]
