"""EngineChild: one engine process, the socket to it, and the threads by which an event loop talks to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from specinfer.errors import UserError
from specinfer.kernels.machine import cpu_share

if TYPE_CHECKING:  # this module starts the process, so it loads nothing that takes time
    import asyncio

    from specinfer.config import EngineConfig
    from specinfer.serve.backend.cluster import Cluster
    from specinfer.serve.backend.work import EngineInfo

_HUNG_UP: Final = 1.0  # seconds: a process's socket closes a moment before it ends
_GRACE_SECONDS: Final = 5.0  # for an engine to end by itself
Message = tuple[Any, ...]


class EngineChild:
    """A process that begins to load what every engine needs, and an engine once it is started with a config.

    With a cluster the engine is an actor on some node, and the process is its relay (ray_relay.py). `log` is
    the level and the form of its log. As a context manager it ends with the block. Once it has started,
    threads read and write, so that the event loop waits neither for a socket nor for its end.
    """

    def __init__(
        self, log: tuple[str, str], number: int = 0, count: int = 1, cluster: Cluster | None = None
    ) -> None:
        """Start process `number` of `count`, each of which has its share of the cores."""
        name = "engine" if count == 1 else f"engine {number}"
        module, *more = ("specinfer.serve.backend.engine_process",) if cluster is None else cluster.relay
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(its.fileno()), *log, name, *more],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env=None if cluster is None else cluster.env,
                start_new_session=True,  # Ctrl-C is for the server, which lets it finish
            )
        if count > 1 and cluster is None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # it has ended, or the system does not let us
                os.sched_setaffinity(self._process.pid, cpu_share(number, count))
        self.cluster = cluster
        self._connection = Connection(ours.detach())
        self._closing = False
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reap(0.0)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """With which status it ended, negative for a signal; None until somebody has waited for that."""
        return self._process.returncode

    async def start(
        self,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EngineChild, Message], None],
        died: Callable[[EngineChild], None],
    ) -> EngineInfo:
        """Have the process load an engine, and wait until it is ready.

        From then on `deliver(self, message)` and, once the process has ended, `died(self)` are called on the
        loop. Raises UserError with its own words where it cannot serve `config`, BackendError where it dies.
        """
        self._loop = loop
        facts = await loop.run_in_executor(None, self._load, config)
        # Only now, on the loop: a process that dies at once is heard of when the caller knows it is ready.
        threading.Thread(target=self._read, args=(deliver, died), name="engine-reader", daemon=True).start()
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()
        return facts

    def send(self, message: Message) -> None:
        """Send a message some time soon; one to a process that has died is dropped."""
        self._outbox.put(message)

    async def close(self) -> None:
        """Hang up, and see that the process, which has started, ends."""
        self._closing = True
        self._outbox.put(None)
        await self._loop.run_in_executor(None, self._reap, _GRACE_SECONDS)

    def kill(self) -> None:
        """End the process, and do not wait for it."""
        self._process.kill()

    def _load(self, config: EngineConfig) -> EngineInfo:
        try:
            self._connection.send(config)
            kind, said = self._connection.recv()
        except (EOFError, OSError):
            from specinfer.serve.backend.work import BackendError

            self._reap(_HUNG_UP)
            raise BackendError(f"the engine ended with status {self.status} before it was ready") from None
        if kind == "failed":
            self._reap(_HUNG_UP)
            raise UserError(said)
        facts: EngineInfo = said
        return facts

    def _read(
        self, deliver: Callable[[EngineChild, Message], None], died: Callable[[EngineChild], None]
    ) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            self._tell(deliver, self, message)
        self._outbox.put(None)  # the writing thread ends too, and hangs up
        # One that only hung up has memory that the next one needs.
        self._reap(_GRACE_SECONDS if self._closing else _HUNG_UP)
        self._tell(died, self)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the reading thread tells of a process that is gone
                self._connection.send(message)
        # Close the socket for both ends, though the other thread may read of it; the process ends then.
        with contextlib.suppress(OSError):
            borrowed = socket.socket(fileno=self._connection.fileno())
            with contextlib.suppress(OSError):  # it has hung up
                borrowed.shutdown(socket.SHUT_RDWR)
            borrowed.detach()  # the connection closes it

    def _tell(self, hear: Callable[..., None], *what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(hear, *what)

    def _reap(self, patience: float) -> None:
        """Wait until it has ended; after `patience` seconds it is killed."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
