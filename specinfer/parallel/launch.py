"""Followers of this host: the processes of ranks 1, 2, ..., from their start to their end.

    rank 0                                       a follower (parallel/follower.py)
    starts it, a socket for its link             ends when the link or its parent does
    settings: the model, its kind, kernels  -->
                                            <--  what it has loaded and runs on, or why it cannot
    let us meet (parallel/meeting.py)       -->
    messages of runtime/sharded.py          -->

Nothing has a name or a port that is fixed: the socket is inherited.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psutil

from specinfer.errors import ModelError, PeerLostError
from specinfer.parallel.group import LIMIT, Group, Loss
from specinfer.parallel.link import Link
from specinfer.parallel.meeting import HERE

PEER_LOST: Final = 75  # the status with which a follower ends that has lost a rank itself
_FOLLOWER: Final = (sys.executable, "-m", "specinfer.parallel.follower")
_GRACE: Final = 1.0  # seconds for followers to end by themselves
_LOOK: Final = 0.5  # seconds after which it is looked again whether all of them live
_HEARD: Final = 0.5  # seconds within which those end that have noticed a loss
_LOADING: Final = 600.0  # seconds that a follower may take to load after this rank has


class Followers:
    """Processes of ranks 1 .. size - 1; each begins to load what its settings say."""

    def __init__(self, settings: Sequence[Mapping[str, object]], memory: Sequence[int] = ()) -> None:
        """`settings` are those of rank after rank, from rank 1 on (parallel/follower.py); JSON holds them.

        `memory` are the numbers of files of memory that each of them shares with others, and inherits.
        """
        self._memory = [[file] for file in memory] or [[]] * len(settings)
        self.links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started, self._closing = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        self.on_end: Callable[[], object] | None = None  # called once when one has ended before `close`
        # Linux takes the end of the thread that has started a process for the end of its parent.
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        self._started.wait()
        if self._failure is not None:
            self.close()
            raise self._failure
        for link, one in zip(self.links, settings, strict=True):
            with contextlib.suppress(OSError):  # it has ended, as `ready` will tell
                link.send(json.dumps(one).encode())

    def ready(self, identity: Mapping[str, str]) -> None:
        """Wait until all have loaded; they must run what this rank runs.

        Raises ModelError where one of them cannot, or is another (its code, its kernels, its file), and
        PeerLostError where one ends or takes too long.
        """
        for rank, link in enumerate(self.links, start=1):
            link.within(_LOADING)
            try:
                said: Any = json.loads(link.receive())
            except (EOFError, OSError, ValueError):
                lost = self.lost()
                raise PeerLostError(f"{lost.words} before it was ready; start it again", lost.rank) from None
            if "failed" in said:
                raise ModelError(f"rank {rank} cannot load the model: {said['failed']}")
            others = [name for name, value in identity.items() if said["identity"].get(name) != value]
            if others:
                raise ModelError(
                    f"rank {rank} has another {' and '.join(others)} than rank 0; all ranks must run the "
                    "same: start them from one installation and one model"
                )

    def meet(self, group: Group) -> None:
        """Have all ranks meet; raises PeerLostError as Group."""
        for link in self.links:
            link.within(LIMIT)
            with contextlib.suppress(OSError):
                link.send(json.dumps({"meet": HERE}).encode())
        group.connect()

    def lost(self) -> Loss:
        """Which rank is lost, and how; waits a moment for those to end that have noticed it."""
        until = time.monotonic() + _HEARD
        while time.monotonic() < until:
            ended = self._ended()
            if any(status != PEER_LOST for status in ended.values()):
                break
            time.sleep(0.01)
        ended = self._ended()
        guilty = [rank for rank, status in ended.items() if status != PEER_LOST]
        silent = [rank for rank in range(1, len(self._processes) + 1) if rank not in ended]
        # Those that wait for a rank that is stopped say nothing, either.
        silent.sort(key=lambda rank: not _stopped(self._processes[rank - 1].pid))
        rank = [*guilty, *silent, *ended][0]
        how = f"has ended with status {ended[rank]}" if rank in ended else "does not answer"
        return Loss(rank, f"rank {rank} (process {self._processes[rank - 1].pid}) {how}")

    def close(self) -> None:
        """Close the links, whereupon followers end; one that does not is killed. Never waits."""
        for link in self.links:
            link.close()
        self._closing.set()

    def wait(self) -> None:
        """Wait until all have ended, after `close`."""
        self._keeper.join()

    def _ended(self) -> dict[int, int]:
        """The status of each rank that has ended."""
        found = {rank: process.poll() for rank, process in enumerate(self._processes, start=1)}
        return {rank: status for rank, status in found.items() if status is not None}

    def _keep(self) -> None:
        """The thread that starts them, and sees them end."""
        try:
            for memory in self._memory:
                ours, its = socket.socketpair()
                self.links.append(Link(ours))
                with its:
                    process = subprocess.Popen(
                        [*_FOLLOWER, *map(str, (its.fileno(), *memory))],
                        pass_fds=[its.fileno(), *memory],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C is for rank 0, which ends its pass
                    )
                self._processes.append(process)
        except OSError as error:
            self._failure = error
        self._started.set()
        while not self._closing.wait(_LOOK):
            if self.on_end is not None and self._ended():
                self.on_end()
                self._closing.wait()
        until = time.monotonic() + _GRACE
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _stopped(number: int) -> bool:
    """Whether a process is stopped, by a signal say."""
    try:
        return bool(psutil.Process(number).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
