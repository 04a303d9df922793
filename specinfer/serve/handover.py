"""Hand-over of the port: the server's command runs again, in a new process that gets the listening socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Final

_VARIABLE: Final = "SPECINFER_HANDOVER"  # descriptors of the socket and of the pipe, of the new process


class Successor:
    """A new process that is starting; it ends with `cancel`, or lives on once it is ready."""

    def __init__(self, listener: int) -> None:
        """Start this process's command again, with the descriptor of the listening socket.

        Raises OSError if the system cannot start it, as without memory.
        """
        self._reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                pass_fds=(listener, writing),
                stdin=subprocess.DEVNULL,
                env={**os.environ, _VARIABLE: f"{listener},{writing}"},
            )
        except OSError:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid

    async def failure(self) -> int | None:
        """Wait until the process is ready, and return None; its exit status if it ended before."""
        loop = asyncio.get_running_loop()
        written = asyncio.Event()
        loop.add_reader(self._reading, written.set)
        try:
            await written.wait()
            is_ready = os.read(self._reading, 1) != b""
        finally:
            loop.remove_reader(self._reading)
            os.close(self._reading)
        return None if is_ready else await asyncio.to_thread(self._process.wait)

    def cancel(self) -> None:
        """End the process."""
        self._process.terminate()


class Inheritance:
    """The listening socket that another server hands over to this process, and the pipe of its readiness."""

    def __init__(self, descriptors: str) -> None:
        listener, self._pipe = map(int, descriptors.split(","))
        self.listener = socket.socket(fileno=listener)
        os.set_inheritable(self._pipe, False)

    @classmethod
    def take(cls) -> Inheritance | None:
        """Return what this process was given; None if its user started it."""
        given = os.environ.pop(_VARIABLE, None)
        return None if given is None else cls(given)

    def report_ready(self) -> None:
        """Report to the other server that this one answers; it then stops."""
        with suppress(BrokenPipeError):  # it has ended meanwhile
            os.write(self._pipe, b"1")
        os.close(self._pipe)


def has_terminal() -> bool:
    """Return whether the process has a controlling terminal, whose end sends it a SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
