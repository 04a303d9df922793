"""Engine process as its server sees it: the process, its socket, and the threads that read and write."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

from specinfer.errors import UserError
from specinfer.kernels.machine import cpu_share

if TYPE_CHECKING:  # this module has to load fast: it starts the process
    import asyncio

    from specinfer.config import EngineConfig
    from specinfer.serve.backend.cluster import Cluster
    from specinfer.serve.backend.work import EngineInfo

_HUNG_UP: Final = 1.0  # seconds to wait for a process whose socket has closed
_GRACE_SECONDS: Final = 5.0  # in which an engine that was closed has to end
Message = tuple[Any, ...]


class EngineChild:
    """Engine process: it loads the engine's code at once, and the model when `start` sends a config.

    With a cluster the engine is an actor on some node, and the process is its relay (ray_relay.py). `log` is
    the level and the format of its log. As a context manager it ends with the block. After `start` two
    threads read and write, so the event loop never waits for the socket or for the process to end.
    """

    def __init__(
        self, log: tuple[str, str], number: int = 0, count: int = 1, cluster: Cluster | None = None
    ) -> None:
        """Start process `number` of `count`; they divide the CPU cores among themselves."""
        name = "engine" if count == 1 else f"engine {number}"
        module, *more = ("specinfer.serve.backend.engine_process",) if cluster is None else cluster.relay
        parent, child = socket.socketpair()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(child.fileno()), *log, name, *more],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                env=None if cluster is None else cluster.env,
                start_new_session=True,  # Ctrl-C goes to the server only, which lets this process finish
            )
        if count > 1 and cluster is None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # the process has ended, or the system forbids it
                os.sched_setaffinity(self._process.pid, cpu_share(number, count))
        self.cluster = cluster
        self.pid = self._process.pid
        self._connection = Connection(parent.detach())
        self._closing = False
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reap(0.0)

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None until the process has been waited for."""
        return self._process.returncode

    async def start(
        self,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EngineChild, Message], None],
        died: Callable[[EngineChild], None],
    ) -> EngineInfo:
        """Load an engine in the process, and wait until it is ready.

        After that `deliver(self, message)` is called on the loop for each message, and `died(self)` once the
        process has ended. Raises UserError with the engine's message if it cannot serve `config`, and
        BackendError if the process dies first.
        """
        self._loop = loop
        facts = await loop.run_in_executor(None, self._load, config)
        # Started here, on the loop, so that `died` is called only after this method has returned.
        threading.Thread(target=self._read, args=(deliver, died), name="engine-reader", daemon=True).start()
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()
        return facts

    def send(self, message: Message) -> None:
        """Queue a message for the writer thread; a message to a dead process is dropped."""
        self._outbox.put(message)

    async def close(self) -> None:
        """Close the socket of a started process and wait for its end; kill it after 5 seconds."""
        self._closing = True
        self._outbox.put(None)
        await self._loop.run_in_executor(None, self._reap, _GRACE_SECONDS)

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    def _load(self, config: EngineConfig) -> EngineInfo:
        try:
            self._connection.send(config)
            kind, result = self._connection.recv()
        except (EOFError, OSError):
            from specinfer.serve.backend.work import BackendError

            self._reap(_HUNG_UP)
            line = f"the engine ended with status {self.status} before it was ready"
            if self.status == -signal.SIGKILL:
                line += (
                    ": it was killed, as the system does when the memory of the machine or container is "
                    "full; choose a smaller model, fewer drafts or less KV cache, or raise that limit"
                )
            raise BackendError(line) from None
        if kind == "failed":
            self._reap(_HUNG_UP)
            raise UserError(result)
        facts: EngineInfo = result
        return facts

    def _read(
        self, deliver: Callable[[EngineChild, Message], None], died: Callable[[EngineChild], None]
    ) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            self._call(deliver, self, message)
        self._outbox.put(None)  # ends the writer thread, which closes the socket
        # A process that closed its socket but lives on is killed: the next engine needs its memory.
        self._reap(_GRACE_SECONDS if self._closing else _HUNG_UP)
        self._call(died, self)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the reader thread reports a process that has ended
                self._connection.send(message)
        # Shut down both directions, although the reader thread may be reading; the process ends then.
        with contextlib.suppress(OSError):
            borrowed = socket.socket(fileno=self._connection.fileno())
            with contextlib.suppress(OSError):  # the process closed it first
                borrowed.shutdown(socket.SHUT_RDWR)
            borrowed.detach()  # the connection closes it

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _reap(self, patience: float) -> None:
        """Wait for the process to end; kill it after `patience` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
