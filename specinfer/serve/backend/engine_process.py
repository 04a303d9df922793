"""Process that owns the engine: `python -m specinfer.serve.backend.engine_process FD LEVEL FORMAT NAME`.

HTTP never waits for a step, and a step never waits for HTTP. The server sends an EngineConfig over the socket
FD, and then commands:

    ("add", works)        checked, then submitted to the loop
    ("abort", ids)        aborted before the next step
    ("ask", number)       query for the statistics

The process replies ("ready", facts) or ("failed", message), and then sends

    ("busy", ids)             the works of the step that begins, and the works that are being checked
    ("deltas", [...], state)  all deltas that are ready: a busy engine sends one message per step. `state` has
                              the statistics when an answer ends and every 0.2 seconds, else None. A work's
                              first delta is empty: it is admitted. So is the one when its first step begins
    ("answer", number, state) the reply to "ask"

"busy" is sent before the step begins, because the process may die in that step. The process ends when the
socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from specinfer.config import EngineConfig
from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.steps import TreeEvent
from specinfer.errors import (
    CapacityError,
    ClosedError,
    PeerLostError,
    RequestError,
    SpecInferError,
    allocating,
)
from specinfer.progress import LineProgress, default_progress
from specinfer.request import Delta, FinishReason
from specinfer.serve.backend.work import Work, info_of
from specinfer.serve.config import configure

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.parallel.processes import FollowerProcesses

_LOG = logging.getLogger(__name__)
_READERS: Final = 3  # threads that read commands: all but one may check works without a form meanwhile
_FORM_THREADS: Final = 2  # that check works with a form, and works that find no reader
_SEND_SECONDS: Final = 0.1  # that a step waits at most for a server that reads nothing
_STATE_SECONDS: Final = 0.2  # between reports of the statistics; a crash loses later counts
_INTERNAL_ERROR: Final = 70  # exit status after a failed step, or if answers cannot be sent (EX_SOFTWARE)
_PEER_LOST: Final = 75  # exit status after the loss of a rank (EX_TEMPFAIL)
Message = tuple[Any, ...]


@dataclass(eq=False)
class _WorkInHand:
    """One work in progress."""

    work: Work
    admitted: AdmittedRequest | None = None  # None until it is checked
    aborted: bool = False
    started: bool = False  # True after its first step has started
    trees: list[dict[str, Any]] = field(default_factory=list)  # of the current step


class EngineProcess:
    """Executes a server's commands on one LLM, whose loop runs in its own thread."""

    def __init__(self, llm: LLM, connection: Connection, *, linger: float = 0.0) -> None:
        self._llm, self._intake, self._loop = llm, llm.intake, llm.loop
        self._linger = linger
        self._connection = connection
        self._answers: dict[str, _WorkInHand] = {}  # by work id, which is also the request id
        self._sending = threading.Lock()  # guards the connection and `_checked`
        self._checked: set[str] = set()  # works that the intake is checking
        self._stepped: list[str] = []  # requests in the last step that began
        self._outbox: SimpleQueue[Delta | Message] = SimpleQueue()
        self._reading = threading.Lock()
        self._checks = threading.Semaphore(_READERS - 1)  # so that one thread reads
        # A grammar may take seconds to compile, which delays no command and no work without one.
        self._forms = ThreadPoolExecutor(_FORM_THREADS, thread_name_prefix="forms")

    def serve(self) -> None:
        """Execute commands until the socket closes."""
        llm = self._llm
        llm.on_step = self._on_step
        self._loop.on_failed = self._on_failed
        self._loop.rest_when_idle()
        if (group := llm.models.target.group) is not None:
            group.watch(lambda error: self._on_failed(error, ()))
        threading.Thread(target=self._send, name="outbox", daemon=True).start()
        self._outbox.put(("ready", info_of(llm)))
        for _ in range(_READERS - 1):
            threading.Thread(target=self._execute, name="commands", daemon=True).start()
        self._execute()

    def _execute(self) -> None:
        """Execute commands until the socket closes, while other threads do the same."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                with self._reading:  # only checks may be overtaken: a work is known before it is aborted
                    command, argument = self._connection.recv()
                    if command == "abort":
                        self._abort(argument)
                    elif command == "ask":
                        self._outbox.put(("answer", argument, self._llm.statistics()))
                    given = [_WorkInHand(work) for work in argument] if command == "add" else []
                    self._answers.update((one.work.id, one) for one in given)
                for answer in given:
                    has_form = answer.work.params.structured_output is not None
                    if has_form or not self._checks.acquire(blocking=False):
                        self._forms.submit(self._admit, answer)
                        continue
                    self._admit(answer)
                    self._checks.release()

    def _admit(self, answer: _WorkInHand) -> None:
        """Check a work and submit it to the loop."""
        work = answer.work
        if answer.aborted:  # before its turn: no need to compile its grammar
            self._answers.pop(work.id, None)
            return
        try:
            with self._checking(work):
                admitted = self._intake.completion(
                    *(work.prompt_token_ids, work.params),
                    index=work.index,
                    prior_output=work.prior_output,
                    request_id=work.id,
                    adapter=work.adapter,
                )
            answer.admitted = admitted
            if work.traced:
                self._llm.on_tree = self._on_tree  # stays: another thread may start a traced work
            self._loop.submit([admitted], partial(self._receive, answer))
            self._outbox.put(Delta(work.id))
            if answer.aborted:  # while it was checked
                self._loop.cancel([admitted])
        except BaseException as error:  # Rust libraries raise these, and the client needs a reply
            if not isinstance(error, SpecInferError):
                _LOG.exception("work %s could not be started", work.id)
            self._answers.pop(work.id, None)
            own = error if isinstance(error, RequestError) else None
            refused = Delta(
                work.id,
                finish_reason=FinishReason.ERROR,
                error=str(error) or repr(error),
                parameter=None if own is None else own.parameter,
                internal_error=own is None,
            )
            self._outbox.put(refused)

    def _receive(self, answer: _WorkInHand, delta: Delta) -> None:
        """Take a delta from the loop, which calls this between two steps."""
        if delta.finished:
            self._answers.pop(delta.id, None)
        if answer.trees:
            delta, answer.trees = replace(delta, trees=tuple(answer.trees)), []
        if not answer.aborted:
            self._outbox.put(delta)

    @contextlib.contextmanager
    def _checking(self, work: Work) -> Iterator[None]:
        """List a work as busy while the intake checks it."""
        with self._sending:
            self._checked.add(work.id)
            self._send_busy()
        try:
            yield
        finally:
            with self._sending:
                self._checked.discard(work.id)
                self._send_busy()

    def _on_step(self, request_ids: Sequence[str]) -> None:
        """Report a step's requests, before the step computes anything."""
        if request_ids != self._stepped:
            self._stepped = list(request_ids)
            if not self._send_busy_at_once():
                self._outbox.put(("busy",))
            for name in request_ids:
                answer = self._answers.get(name)
                if answer is not None and not answer.started:
                    answer.started = True
                    self._outbox.put(Delta(name, started=True))

    def _on_failed(self, error: BaseException, names: Sequence[str]) -> None:
        """Exit before any work fails; the server continues the texts, and suspects these works."""
        if isinstance(error, PeerLostError):
            _LOG.error("the engine process ends: %s", str(error))
            time.sleep(self._linger)
            os._exit(_PEER_LOST)
        _LOG.error("the engine process ends, as a step failed", exc_info=error)
        self._stepped = list(names)  # the step may have failed before it was announced
        self._send_busy_at_once()
        os._exit(_INTERNAL_ERROR)

    def _send_busy_at_once(self) -> bool:
        """Send the busy works unless the server reads nothing; returns whether they were sent."""
        if not self._sending.acquire(timeout=_SEND_SECONDS):
            return False
        try:
            room = select.poll()
            room.register(self._connection, select.POLLOUT)
            if ready := bool(room.poll(0)):
                self._send_busy()
            return ready
        finally:
            self._sending.release()

    def _send_busy(self) -> None:
        """Send the busy works at once, ahead of the messages in the outbox."""
        # The loop's thread removes works that end from `_answers` without taking the lock.
        stepped = [name for name in self._stepped if name in self._answers]
        with contextlib.suppress(OSError):  # the server is gone, and the reading threads end the process
            self._connection.send(("busy", [*self._checked, *stepped]))

    def _on_tree(self, event: TreeEvent) -> None:
        """Keep a step's tree; the loop calls this in the step, before `_receive`."""
        answer = self._answers.get(event.request_id)
        if answer is not None and answer.work.traced:
            answer.trees.append(event.to_json(self._llm.tokenizer))

    def _abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            answer = self._answers.get(name)
            if answer is not None:
                answer.aborted = True
                if answer.admitted is not None:
                    self._loop.cancel([answer.admitted])

    def _send(self) -> None:
        """Run the outbox thread, so that the threads that make deltas never wait for the socket."""
        try:
            sent = 0.0  # time of the last statistics
            while True:
                batch = [self._outbox.get()]
                while not self._outbox.empty():
                    batch.append(self._outbox.get())
                deltas = [one for one in batch if isinstance(one, Delta)]
                ending, now, state = any(one.finish_reason for one in deltas), time.monotonic(), None
                if ending or (deltas and now - sent > _STATE_SECONDS):
                    state, sent = self._llm.statistics(), now
                with self._sending:
                    if deltas:
                        self._connection.send(("deltas", deltas, state))
                    for message in batch:
                        if message == ("busy",):  # with the works of now: a later message may have been sent
                            self._send_busy()
                        elif not isinstance(message, Delta):
                            self._connection.send(message)
        except (OSError, ClosedError):  # the server is gone, and the reading threads end the process
            return
        except BaseException:
            # Without this thread no answer reaches the server. The server restarts a process that ends.
            _LOG.exception("the engine process ends, as it cannot send its answers")
            os._exit(_INTERNAL_ERROR)


def end_with(server: int) -> None:
    """End this process within a second of its server, even while it loads and reads no socket."""
    while os.getppid() == server:
        time.sleep(1.0)
    os._exit(0)


def load_code() -> None:
    """Import the engine's code, without garbage collection meanwhile or later scans of these objects."""
    gc.disable()
    import specinfer.llm  # noqa: F401 - `run` imports it

    gc.freeze()
    gc.enable()


def run(
    connection: Connection,
    config: EngineConfig,
    processes: FollowerProcesses | None = None,
    *,
    linger: float = 0.0,
) -> int:
    """Load an engine with this config, report it ready, and serve until the other side closes the socket.

    `processes` are its followers if they have been started. Returns the exit status: 0, or 2 after a "failed"
    message. If a rank is lost, the process exits `linger` seconds after its last log line.
    """
    from specinfer.engine.models import load_models
    from specinfer.llm import LLM

    on_terminal = sys.stderr.isatty()
    show = default_progress(shows_lines=False) if on_terminal else LineProgress(_LOG.info)
    try:
        with allocating():
            models = load_models(config, show, processes)
            llm = LLM.from_models(models.settled(config), models, progress=show)
    except SpecInferError as error:
        return _failed(connection, error, processes)
    with llm:
        EngineProcess(llm, connection, linger=linger).serve()
    return 0


def _failed(connection: Connection, error: Exception, processes: FollowerProcesses | None) -> int:
    """Report an error of the start to the server, and end the followers; returns the exit status."""
    connection.send(("failed", str(error)))
    if processes is not None:
        processes.close()
        processes.wait()
    return 2


def _receive_config(connection: Connection) -> tuple[EngineConfig, FollowerProcesses | None]:
    """Wait for the config, and start its followers, which import PyTorch while this process does."""
    config: EngineConfig = connection.recv()
    if config.ranks_here == 1:
        return config, None
    from specinfer.parallel.processes import FollowerProcesses

    return config, FollowerProcesses(config.ranks_here, config.tensor_parallel)


def main() -> None:
    """Load the engine of the config that comes first, and serve until the server closes the socket."""
    threading.Thread(target=end_with, args=(os.getppid(),), name="server-watch", daemon=True).start()
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    first = ThreadPoolExecutor(1, thread_name_prefix="config").submit(_receive_config, connection)
    lacking: CapacityError | None = None
    try:
        with allocating():
            load_code()
    except CapacityError as error:
        lacking = error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the server, which drains and closes
    configure(sys.argv[3], sys.argv[2], sys.argv[4])
    try:
        config, processes = first.result()
    except (EOFError, OSError):  # the server ended before it had a config
        sys.exit(0)
    status = _failed(connection, lacking, processes) if lacking else run(connection, config, processes)
    if status:
        sys.exit(status)
    os._exit(0)  # threads may still compile a grammar; do not wait for them


if __name__ == "__main__":
    main()
