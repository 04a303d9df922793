"""FollowerProcesses: starts the processes of this host's followers, and sees them end.

A process first imports PyTorch, which takes seconds, and then waits for its settings (parallel/follower.py).
So an engine process starts its followers before it imports PyTorch itself. On one host no name or port is
fixed: the sockets and the shared memory are inherited.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from specinfer.kernels.exchange import shared_file
from specinfer.transport.link import Link

_GRACE: Final = 1.0  # seconds for followers to end by themselves
_CHECK_INTERVAL: Final = 0.5  # seconds between calls of `check`


class FollowerProcesses:
    """The processes of ranks 1, 2, ... on this host, and their links."""

    def __init__(self, ranks: int, width: int) -> None:
        """Start the processes in a thread, for `ranks` ranks of this host, rank 0 included.

        `width` is the number of ranks of a stage; each stage of this host shares a memory file.
        """
        self.memory: dict[int, int] = {}  # files by the first rank of a stage, after `started`
        self.check: Callable[[], object] | None = None  # called twice a second until `close`
        self._all: list[tuple[Link, subprocess.Popen[bytes]]] = []
        self._failure: BaseException | None = None
        self._started, self._closing = threading.Event(), threading.Event()
        # Linux treats the end of the thread that started a process as the end of its parent.
        self._thread = threading.Thread(target=self._run, args=(ranks, width), daemon=True)
        self._thread.start()

    def started(self) -> list[tuple[Link, subprocess.Popen[bytes]]]:
        """Wait until all have been started; raises the error, an OSError as a rule, if one could not be."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self._all

    def close_files(self) -> None:
        """Close the memory files, which rank 0 has mapped and the others have inherited."""
        while self.memory:
            os.close(self.memory.popitem()[1])

    @property
    def closing(self) -> bool:
        """True after `close`."""
        return self._closing.is_set()

    def close(self) -> None:
        """Close the links, which ends the processes; one that does not end is killed. Never waits."""
        self._closing.set()
        for link, _ in self._all:
            link.close()

    def wait(self) -> None:
        """Wait until all have ended, after `close`."""
        self._thread.join()

    def _run(self, ranks: int, width: int) -> None:
        try:
            for first in range(0, ranks - width + 1, width) if width > 1 else ():
                self.memory[first] = shared_file()
            for _ in range(1, ranks):
                parent, child = socket.socketpair()
                with child:
                    process = spawn(child.fileno(), None, self.memory)
                self._all.append((Link(parent), process))
        except BaseException as error:  # `started` raises it in the thread that waits
            self._failure = error
        self._started.set()
        while not self._closing.wait(_CHECK_INTERVAL):
            if self.check is not None:
                self.check()
        until = time.monotonic() + _GRACE
        for link, process in self._all:
            link.close()  # one that was started after `close`
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()


def spawn(
    link: int, model: Path | None, memory: Mapping[int, int], key_file: str | None = None
) -> subprocess.Popen[bytes]:
    """Start the process of a follower on this host, with inherited files; raises OSError.

    It inherits the socket `link`, which leads to rank 0, and the shared-memory file of each stage in
    `memory`, keyed by the first rank of the stage. Without `model` it loads the one of its settings.
    """
    arguments = {
        "link": link,
        "model": None if model is None else str(model),
        "memory": memory,
        "key_file": key_file,
        "parent": os.getpid(),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "specinfer.parallel.follower", json.dumps(arguments)],
        pass_fds=[link, *memory.values()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is handled by the parent
    )
