"""Engine process as its server sees it: the process and its socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
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
_LENGTH: Final = 4  # bytes of the length of a message
_LARGE: Final = 1 << 18  # bytes of a message whose pickle is read in a thread
Message = tuple[Any, ...]


class EngineChild:
    """Engine process: it loads the engine's code at once, and the model when `start` sends a config.

    With a cluster the engine is an actor on some node, and the process is its relay (ray_relay.py). `log` is
    the level and the format of its log. As a context manager it ends with the block. The event loop never
    waits for the socket or for the process to end. Messages have the form of multiprocessing's Connection,
    which the process uses: the length of a pickle, and the pickle.
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
        parent.setblocking(False)
        self._socket = parent
        self._writing: asyncio.Task[None] | None = None  # of the last message
        self._patience = _HUNG_UP

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
        self.send(config)
        try:
            kind, result = await self._receive()
        except (EOFError, OSError):
            from specinfer.serve.backend.work import BackendError

            await self._end(_HUNG_UP)
            line = f"the engine ended with status {self.status} before it was ready"
            if self.status == -signal.SIGKILL:
                line += (
                    ": it was killed, as the system does when the memory of the machine or container is "
                    "full; choose a smaller model, fewer drafts or less KV cache, or raise that limit"
                )
            raise BackendError(line) from None
        if kind == "failed":
            await self._end(_HUNG_UP)
            raise UserError(result)
        self._reading = loop.create_task(self._read(deliver, died))
        facts: EngineInfo = result
        return facts

    def send(self, message: object) -> None:
        """Send a message without waiting; one to a dead process is dropped."""
        self._writing = self._loop.create_task(self._write(pickle.dumps(message), self._writing))

    async def close(self) -> None:
        """Close the socket of a started process and wait for its end; kill it after 5 seconds."""
        self._patience = _GRACE_SECONDS
        with contextlib.suppress(OSError):  # the process closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        await self._reading

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    async def _read(
        self, deliver: Callable[[EngineChild, Message], None], died: Callable[[EngineChild], None]
    ) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._loop.call_soon(deliver, self, await self._receive())
        # A process that closed its socket but lives on is killed: the next engine needs its memory.
        await self._end(self._patience)
        died(self)

    async def _receive(self) -> Any:
        data = await self._exactly(int.from_bytes(await self._exactly(_LENGTH)))
        if len(data) > _LARGE:
            return await self._loop.run_in_executor(None, pickle.loads, data)
        return pickle.loads(data)

    async def _exactly(self, size: int) -> bytearray:
        """Return the next `size` bytes; raises EOFError at the end, behind all that the process sent."""
        data = bytearray()
        while len(data) < size:
            if not (more := await self._loop.sock_recv(self._socket, size - len(data))):
                raise EOFError
            data += more
        return data

    async def _write(self, data: bytes, earlier: asyncio.Task[None] | None) -> None:
        """Send a message behind the `earlier` one; a stream of asyncio would end the reader when it fails."""
        if earlier is not None:
            await earlier
        with contextlib.suppress(OSError):  # the process has ended, which `_read` reports
            await self._loop.sock_sendall(self._socket, len(data).to_bytes(_LENGTH) + data)

    async def _end(self, patience: float) -> None:
        await self._loop.run_in_executor(None, self._reap, patience)
        self._socket.close()

    def _reap(self, patience: float) -> None:
        """Wait for the process to end; kill it after `patience` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
