"""EngineChild: one engine process, and the socket to it."""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

HUNG_UP: Final = 1.0  # seconds: a process's socket closes a moment before it ends
Message = tuple[Any, ...]


class EngineChild:
    """A process that begins to load what every engine needs, and an engine once it is sent a config.

    `log` is the level and the form of its log. As a context manager it ends with the block.
    """

    def __init__(self, log: tuple[str, str]) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specinfer.serve.engine_process", str(its.fileno()), *log],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which lets it finish
            )
        self._connection = Connection(ours.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reap(0.0)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """With which status it ended, negative for a signal; None until somebody has waited for that."""
        return self._process.returncode

    def receive(self) -> Message:
        """Its next message; raises EOFError or OSError where there will be none."""
        message: Message = self._connection.recv()
        return message

    def send(self, message: object) -> None:
        """Send it a message; raises OSError where it is gone."""
        self._connection.send(message)

    def hang_up(self) -> None:
        """Close the socket for both ends, whoever reads of it in another thread; the process ends then."""
        try:
            borrowed = socket.socket(fileno=self._connection.fileno())
        except OSError:
            return
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has hung up
            pass
        finally:
            borrowed.detach()  # the connection closes it

    def kill(self) -> None:
        """End it, and do not wait until it has ended."""
        self._process.kill()

    def reap(self, patience: float) -> None:
        """Wait until it has ended; after `patience` seconds it is killed."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
