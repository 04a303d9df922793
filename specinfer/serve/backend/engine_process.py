"""The process that owns the engine: `python -m specinfer.serve.backend.engine_process FD LEVEL FORMAT NAME`.

HTTP never waits for a step, nor a step for HTTP. Over the socket FD come an EngineConfig and then commands:

    ("add", works)        checked and tokenized in threads, then submitted to the loop
    ("abort", ids)        before the next step
    ("ask", number)       for the state

and go ("ready", facts) or ("failed", message), then

    ("busy", ids)             the works of the step that begins, and those that are being checked
    ("deltas", [...], state)  all that are there, so a busy engine sends one message a step; with the state
                              where an answer ends and now and then, else None. A work's first delta says
                              nothing: it is admitted. So does the one with which its first step begins
    ("answer", number, state)

Whose works it is about is said before it begins: the next step may be the process's last. When the socket
closes, the process ends.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from specinfer.config import ENGINE_OPTIONS, EngineConfig
from specinfer.engine.admission import Admitted
from specinfer.engine.trace import TreeEvent
from specinfer.errors import ClosedError, PeerLostError, RequestError, SpecInferError
from specinfer.progress import default_progress
from specinfer.request import Delta, FinishReason
from specinfer.serve.backend.work import EngineInfo, Work
from specinfer.serve.config import configure
from specinfer.version import VERSION

if TYPE_CHECKING:
    from specinfer.llm import LLM

_LOG = logging.getLogger(__name__)
_INTAKE_THREADS: Final = 2  # a grammar takes a second to compile, and others must not wait for it
_STATE_SECONDS: Final = 0.2  # of what it counts, so much may go unheard when it dies
_INTERNAL_ERROR: Final = 70  # the exit status of a process that cannot tell its answers: an internal error
# Options, and parts of a config, on which no text depends.
_MEMORY: Final = ("memory", "offload", "offload_folder", "max_loras")
_FOLDERS: Final = ("lora",)  # texts depend on their files, which the models' origin has
# But for how many parts sums have.
_RANKS: Final = ("tensor_parallel", "pipeline_parallel", "master", "key_file", "local_ranks", "sum_parts")
_WITHOUT_EFFECT: Final = {"speculation", "cache", "scheduler", "threads", *_RANKS, *_MEMORY, *_FOLDERS}
_PEER_LOST: Final = 75  # that of one that has lost a rank of its model: a temporary failure
Message = tuple[Any, ...]


class _WorkInHand:
    """One work in progress."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.admitted: Admitted | None = None  # None until it is checked
        self.aborted = False
        self.begun = False  # whether a step has begun that it takes part in
        self.trees: list[dict[str, Any]] = []  # of the step that runs


class EngineProcess:
    """Carries out a server's commands on one LLM, whose loop runs in its own thread."""

    def __init__(self, llm: LLM, connection: Connection, *, linger: float = 0.0) -> None:
        self._llm = llm
        self._linger = linger
        self._connection = connection
        self._answers: dict[str, _WorkInHand] = {}  # by the work's id, which is that of its request, too
        self._sending = threading.Lock()  # guards the connection, and the two below
        self._checked: set[str] = set()  # works in the intake's hands
        self._stepped: list[str] = []  # requests of the last step that began
        self._outbox: SimpleQueue[Delta | Message] = SimpleQueue()
        self._intake = ThreadPoolExecutor(_INTAKE_THREADS, thread_name_prefix="intake")

    def serve(self) -> None:
        """Carry out commands until the socket closes."""
        llm = self._llm
        llm.on_step = self._on_step
        llm.loop.on_lost = self._on_lost
        if (group := llm.models.target.group) is not None:
            group.watch(self._on_lost)
        llm.loop.start()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()
        facts = EngineInfo(
            llm.max_context,
            llm.intake.longest,
            llm.intake.speculators,
            llm.config.speculation,
            fingerprint(llm),
        )
        self._outbox.put(("ready", facts))
        commands: dict[str, Callable[[Any], None]] = {
            "add": self._add,
            "abort": self._abort,
            "ask": self._ask,
        }
        while True:
            try:
                command, argument = self._connection.recv()
            except (EOFError, OSError):
                return
            commands[command](argument)

    def _add(self, works: Iterable[Work]) -> None:
        for work in works:
            self._answers[work.id] = _WorkInHand(work)
            self._intake.submit(self._admit, self._answers[work.id])

    def _admit(self, answer: _WorkInHand) -> None:
        """Check a work and hand it to the loop; in a thread of the intake."""
        work = answer.work
        if answer.aborted:  # before its turn: nobody waits for its grammar
            self._answers.pop(work.id, None)
            return
        try:
            with self._checking(work):
                admitted = self._llm.intake.completion(
                    *(work.prompt_token_ids, work.params),
                    index=work.index,
                    said=work.said,
                    request_id=work.id,
                    adapter=work.adapter,
                )
            answer.admitted = admitted
            if work.traced:
                self._llm.on_tree = self._on_tree  # for good: another thread may trace the next one by now
            self._llm.loop.submit([admitted], lambda delta: self._receive(answer, delta))
            self._outbox.put(Delta(work.id))
            if answer.aborted:  # meanwhile
                self._llm.loop.cancel([admitted])
        except BaseException as error:  # as libraries in Rust raise, and somebody waits for an answer
            if not isinstance(error, SpecInferError):
                _LOG.exception("work %s could not be begun", work.id)
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
        """Called by the loop between two steps."""
        if delta.finished:
            self._answers.pop(delta.id, None)
        if answer.trees:
            delta, answer.trees = replace(delta, trees=tuple(answer.trees)), []
        if not answer.aborted:
            self._outbox.put(delta)

    @contextlib.contextmanager
    def _checking(self, work: Work) -> Iterator[None]:
        """While the intake checks a work, the process is busy with it."""
        with self._sending:
            self._checked.add(work.id)
            self._tell_busy()
        try:
            yield
        finally:
            with self._sending:
                self._checked.discard(work.id)
                self._tell_busy()

    def _on_step(self, request_ids: Sequence[str]) -> None:
        """Called when it is known who is in a step, before anything is computed."""
        if request_ids != self._stepped:
            with self._sending:
                self._stepped = list(request_ids)
                self._tell_busy()
            for name in request_ids:
                answer = self._answers.get(name)
                if answer is not None and not answer.begun:
                    answer.begun = True
                    self._outbox.put(Delta(name, begun=True))

    def _on_lost(self, error: PeerLostError) -> None:
        """End, before any work hears of it: the next process has all ranks, and goes on with every text."""
        _LOG.error("the engine process ends: %s", str(error))
        time.sleep(self._linger)
        os._exit(_PEER_LOST)

    def _tell_busy(self) -> None:
        """Say at once, not by way of the outbox, which works the process is busy with."""
        # One that ends meanwhile is taken away by the loop's thread, without the lock.
        stepped = [name for name in self._stepped if name in self._answers]
        with contextlib.suppress(OSError):  # the server is gone, and the reading thread ends the process
            self._connection.send(("busy", [*self._checked, *stepped]))

    def _on_tree(self, event: TreeEvent) -> None:
        """Called within a step, before the step's outputs are received."""
        answer = self._answers.get(event.request_id)
        if answer is not None and answer.work.traced:
            try:
                answer.trees.append(event.to_json(self._llm.tokenizer))
            except Exception:  # or the loop would take the step for one that failed
                _LOG.exception("a tree of work %s could not be told", answer.work.id)

    def _abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            answer = self._answers.get(name)
            if answer is not None:
                answer.aborted = True
                if answer.admitted is not None:
                    self._llm.loop.cancel([answer.admitted])

    def _ask(self, number: int) -> None:
        self._outbox.put(("answer", number, self._llm.statistics()))

    def _send(self) -> None:
        """The thread of the outbox: whoever makes deltas does not wait for the socket to take them."""
        try:
            self._send_all()
        except (OSError, ClosedError):  # the server is gone, and the reading thread ends the process
            return
        except BaseException:
            # Nobody would ever hear of an answer again. A process that ends is started again.
            _LOG.exception("the engine process ends, as it cannot tell its answers")
            os._exit(_INTERNAL_ERROR)

    def _send_all(self) -> None:
        told = 0.0
        while True:
            batch = [self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get())
            deltas = [one for one in batch if isinstance(one, Delta)]
            ending, now, state = any(one.finish_reason for one in deltas), time.monotonic(), None
            if ending or (deltas and now - told > _STATE_SECONDS):
                state, told = self._llm.statistics(), now
            with self._sending:
                if deltas:
                    self._connection.send(("deltas", deltas, state))
                for message in batch:
                    if not isinstance(message, Delta):
                        self._connection.send(message)


def fingerprint(llm: LLM) -> str:
    """A text that engines have in common which make the same text of the same work.

    It depends on the target's files, on how they are computed and with which code, and on no draft.
    """
    import torch

    target = llm.models.target
    kernels, library = target.kernels, target.kernels.library
    options = {
        name: getattr(llm.config if part is None else getattr(llm.config, part), one.attribute)
        for name, (part, one) in ENGINE_OPTIONS.items()
        if not {name, part} & _WITHOUT_EFFECT
    }
    parts: list[object] = [
        dict(llm.models.origin),
        options,
        llm.config.parts_of_sums,
        [type(part).__name__ for part in (kernels.ops, kernels.attention, kernels.products)],
        [str(target.device), torch.__version__, VERSION],
        # PyTorch adds as its threads divide the work.
        torch.get_num_threads() if library is None else library.level.name,
    ]
    found = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    if library is not None:
        found.update(library.path.read_bytes())
    root = Path(__file__).parents[2]  # the package
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def end_with(server: int) -> None:
    """End this process within a second of its server, which it would not notice while it loads."""
    while os.getppid() == server:
        time.sleep(1.0)
    os._exit(0)


def load_code() -> None:
    """Load what every engine needs, which stays: it is not gone through while it grows, nor ever again."""
    gc.disable()
    import specinfer.llm  # noqa: F401 - `run` takes it from there

    gc.freeze()
    gc.enable()


def run(connection: Connection, config: EngineConfig, *, linger: float = 0.0) -> int:
    """Load an engine with this config, say so, and serve until the other side hangs up.

    Returns a status for the process: 0, or 2 where the config cannot be served, which was said. Where a rank
    is lost the process ends, so many seconds behind its last line.
    """
    from specinfer.llm import LLM

    try:
        llm = LLM(config, progress=default_progress(says=False))  # the log says it
    except SpecInferError as error:
        connection.send(("failed", str(error)))
        return 2
    with llm:
        EngineProcess(llm, connection, linger=linger).serve()
    return 0


def main() -> None:
    """Load what the config names, say so, and serve until the server hangs up."""
    threading.Thread(target=end_with, args=(os.getppid(),), name="server-watch", daemon=True).start()
    load_code()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains and hangs up
    configure(sys.argv[3], sys.argv[2], sys.argv[4])
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    try:
        config: EngineConfig = connection.recv()
    except (EOFError, OSError):  # the server ended before it had a config
        sys.exit(0)
    if status := run(connection, config):
        sys.exit(status)
    os._exit(0)  # threads of the intake may still compile a grammar for nobody


if __name__ == "__main__":
    main()
