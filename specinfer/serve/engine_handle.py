"""EngineHandle: one engine process, as an event loop holds it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final

from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.serve.backend import BackendError
from specinfer.serve.work import EngineFacts

_GRACE_SECONDS: Final = 5.0  # for an engine to end by itself
Message = tuple[Any, ...]


class EngineHandle:
    """Starts the process, and talks with it in two threads, so that the event loop never waits for a socket.

    `deliver(handle, message)` and, once the process has hung up, `died(handle)` are called on the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EngineHandle, Message], None],
        died: Callable[[EngineHandle], None],
        log: tuple[str, str] = ("info", "text"),
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._died = died
        self._log = log  # its level and its form
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return None if self._process is None else self._process.pid

    def status(self) -> int | None:
        """With which status the process ended, negative for a signal; None while it runs."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its socket closes a moment before it ends
        return self._process.returncode

    async def start(self, config: EngineConfig) -> EngineFacts:
        """Start the process and wait until it is ready.

        Raises UserError with its own words where it cannot serve `config`, BackendError where it dies.
        """
        facts = await asyncio.to_thread(self._start, config)
        # Only now, on the loop: a process that dies at once is heard of when the caller knows the handle.
        for hear, name in ((self._read, "engine-reader"), (self._write, "engine-writer")):
            threading.Thread(target=hear, name=name, daemon=True).start()
        return facts

    def send(self, message: Message) -> None:
        """Send a message some time soon; one to a process that has died is dropped."""
        self._outbox.put(message)

    async def close(self) -> None:
        """Hang up, and see that the process ends."""
        self._outbox.put(None)
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self, config: EngineConfig) -> EngineFacts:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specinfer.serve.engine_process", str(its.fileno()), *self._log],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which lets it finish
            )
        self._connection = connection = Connection(ours.detach())
        try:
            connection.send(config)
            kind, said = connection.recv()
        except (EOFError, OSError):
            raise BackendError(f"the engine ended with status {self.status()} before it was ready") from None
        if kind == "failed":
            raise UserError(said)
        facts: EngineFacts = said
        return facts

    def _read(self) -> None:
        assert self._connection is not None
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._outbox.put(None)  # the writing thread ends too, and the socket goes with this handle
                self._tell(self._died, self)
                return
            self._tell(self._deliver, self, message)

    def _write(self) -> None:
        assert self._connection is not None
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the reading thread tells of a process that is gone
                self._connection.send(message)
        with contextlib.suppress(OSError):
            borrowed = socket.socket(fileno=self._connection.fileno())
            try:
                borrowed.shutdown(socket.SHUT_RDWR)
            finally:
                borrowed.detach()  # the connection closes it

    def _tell(self, hear: Callable[..., None], *what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(hear, *what)
