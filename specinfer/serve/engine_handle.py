"""EngineHandle: one engine process, as an event loop holds it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.serve.engine_child import HUNG_UP, EngineChild, Message
from specinfer.serve.work import BackendError, EngineInfo

_GRACE_SECONDS: Final = 5.0  # for an engine to end by itself


class EngineHandle:
    """Talks with a process in two threads, so that the event loop waits neither for a socket nor for its end.

    `deliver(handle, message)` and, once the process has ended, `died(handle)` are called on the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EngineHandle, Message], None],
        died: Callable[[EngineHandle], None],
        child: EngineChild,
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._died = died
        self._child = child
        self._closing = False
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def status(self) -> int | None:
        """With which status the process ended, negative for a signal; None before that is known."""
        return self._child.status

    async def start(self, config: EngineConfig) -> EngineInfo:
        """Have the process load an engine, and wait until it is ready.

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
        self._closing = True
        self._outbox.put(None)
        await asyncio.to_thread(self._child.reap, _GRACE_SECONDS)

    def kill(self) -> None:
        """End the process, and do not wait for it."""
        self._child.kill()

    def _start(self, config: EngineConfig) -> EngineInfo:
        try:
            self._child.send(config)
            kind, said = self._child.receive()
        except (EOFError, OSError):
            self._child.reap(HUNG_UP)
            raise BackendError(f"the engine ended with status {self.status} before it was ready") from None
        if kind == "failed":
            self._child.reap(HUNG_UP)
            raise UserError(said)
        facts: EngineInfo = said
        return facts

    def _read(self) -> None:
        while True:
            try:
                message = self._child.receive()
            except (EOFError, OSError):
                break
            self._tell(self._deliver, self, message)
        self._outbox.put(None)  # the writing thread ends too, and the socket goes with this handle
        # One that only hung up has memory that the next one needs.
        self._child.reap(_GRACE_SECONDS if self._closing else HUNG_UP)
        self._tell(self._died, self)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the reading thread tells of a process that is gone
                self._child.send(message)
        self._child.hang_up()

    def _tell(self, hear: Callable[..., None], *what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(hear, *what)
