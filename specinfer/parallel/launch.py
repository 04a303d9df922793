"""Followers: the other ranks from rank 0's view.

rank 0                                       a follower (parallel/follower.py)
starts it (parallel/processes.py)            ends when the link or its parent does
or accepts it from another host         <--  (parallel/listener.py)
settings: the kind, kernels             -->
                                        <--  the loaded model and its kernels, or an error
connect the ranks (transport/rendezvous.py) -->
messages of runtime/sharded.py          -->
"""

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psutil

from specinfer.errors import ModelError, PeerLostError
from specinfer.parallel.listener import PEER_LOST, RankListener
from specinfer.parallel.processes import FollowerProcesses
from specinfer.transport.group import LIMIT, Group, Loss
from specinfer.transport.link import Link
from specinfer.transport.rendezvous import HERE
from specinfer.version import VERSION

_SETTLE: Final = 0.5  # seconds for ranks that noticed a loss to end
_LOADING: Final = 600.0  # seconds that a follower may load longer than this rank
_CHECK_INTERVAL: Final = 0.5  # seconds between checks that all followers live
_JOINING: Final = 600.0  # seconds to wait for followers on other hosts


class _Follower:
    """A follower, from rank 0's view."""

    def __init__(self, rank: int, link: Link, host: str, process: subprocess.Popen[bytes] | None) -> None:
        self.rank = rank
        self.link = link
        self.host = host
        self._process = process  # None: on another host
        hosts = link.hosts
        self._where = f"process {process.pid}" if process else f"on {hosts[1]}" if hosts else "elsewhere"

    def __str__(self) -> str:
        """Rank and place, for messages."""
        return f"rank {self.rank} ({self._where})"

    def ended(self) -> str | None:
        """How it has ended; None if it is not known to have ended."""
        if self._process is None:
            return "has closed its link, or its host is unreachable" if self.link.ended() else None
        status = self._process.poll()
        return None if status is None else f"has ended with status {status}"

    def lost_another(self) -> bool:
        """True if it ends because it has lost another rank."""
        if self._process is not None:
            return self.link.lost_another or self._process.poll() == PEER_LOST
        self.link.within(0)
        with contextlib.suppress(EOFError, OSError, ValueError):
            while not self.link.lost_another:
                self.link.receive()
        return self.link.lost_another

    def stopped(self) -> bool:
        """True if its process is known to be stopped, by a signal for example."""
        try:
            found = None if self._process is None else psutil.Process(self._process.pid).status()
        except psutil.Error:
            return False
        return bool(found == psutil.STATUS_STOPPED)


class Followers:
    """Ranks 1 .. size - 1."""

    def __init__(self, processes: FollowerProcesses, listener: RankListener | None = None) -> None:
        """Wait until the followers of this host have been started, and those of `listener` have connected.

        Raises OSError if one cannot be started, PeerLostError if one does not connect.
        """
        self._processes, self._listener = processes, listener
        self._all: list[_Follower] = []
        self._loaded: dict[int, Any] = {}  # messages of the followers that have loaded, by rank
        self._checking = threading.Lock()  # guards `_loaded` and `_failure`: several threads load layers
        self._failure: ModelError | PeerLostError | None = None  # of the first check that failed
        self.on_end: Callable[[], object] | None = None  # called once if a follower ends before `close`
        try:
            here = enumerate(processes.started(), start=1)
            self._all += [_Follower(rank, link, "", process) for rank, (link, process) in here]
            remote = {} if listener is None else listener.wait(_JOINING)
            self._all += [_Follower(rank, one.link, one.host, None) for rank, one in sorted(remote.items())]
        except BaseException:
            self.close()
            raise
        processes.check = self._check

    @property
    def hosts(self) -> list[str]:
        """Hosts of ranks 0, 1, ...: ranks that share memory have the same value, "" on this host."""
        return ["", *(one.host for one in self._all)]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the hosts of ranks 0, 1, ..., "" for this one."""
        pairs = [link.hosts for link in self.links]
        return ["", *("" if pair is None or pair[0] == pair[1] else pair[1] for pair in pairs)]

    def send_settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        """Send each follower its settings (parallel/follower.py) as JSON."""
        for one, given in zip(self._all, settings, strict=True):
            with contextlib.suppress(OSError):  # it has ended, and `ready` raises the error
                one.link.send(json.dumps({**given, "version": VERSION}).encode())

    @property
    def links(self) -> list[Link]:
        """Links to ranks 1, 2, ..."""
        return [one.link for one in self._all]

    @property
    def address(self) -> str:
        """This host's address, as ranks on other hosts see it."""
        return next((link.hosts[0] for link in self.links if link.hosts is not None), HERE)

    def check_loading(self, seconds: float = 0.0) -> None:
        """Check that all followers load or have loaded; waits up to `seconds` for the next one to finish.

        Thread-safe. Raises ModelError if one of them cannot load, PeerLostError if one has ended; later calls
        raise the same error.
        """
        with self._checking:
            if self._failure is None:
                try:
                    self._receive_loaded(seconds)
                except (ModelError, PeerLostError) as error:
                    self._failure = error
            if self._failure is not None:
                raise self._failure

    def _receive_loaded(self, seconds: float) -> None:
        ended = any(one.ended() for one in self._all)  # before its last message is read
        waiting = {one.link.number: one for one in self._all if one.rank not in self._loaded}
        poll = select.poll()
        for number in waiting:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * seconds):
            one = waiting[number]
            one.link.within(LIMIT)
            try:
                message: Any = json.loads(one.link.receive())
            except (EOFError, OSError, ValueError) as error:
                raise self._not_ready() from error
            if "failed" in message:
                raise ModelError(f"rank {one.rank} cannot load the model: {message['failed']}")
            self._loaded[one.rank] = message
        if ended:
            raise self._not_ready()

    def ready(self, identity: Mapping[str, str]) -> list[int]:
        """Wait until all have loaded the same as this rank; return the free bytes of memory at each.

        Raises ModelError if one of them cannot, or differs (its code, its kernels, its file), and
        PeerLostError if one ends or takes too long.
        """
        until = time.monotonic() + _LOADING
        while len(self._loaded) < len(self._all):
            if time.monotonic() > until:
                raise self._not_ready()
            self.check_loading(_CHECK_INTERVAL)
        for rank, message in sorted(self._loaded.items()):
            others = [name for name, value in identity.items() if message["identity"].get(name) != value]
            if others:
                raise ModelError(
                    f"rank {rank} differs from rank 0 in {' and '.join(others)}; all ranks must run the "
                    "same: start them from one installation and one model"
                )
        return [int(message["free"]) for _, message in sorted(self._loaded.items())]

    def _not_ready(self) -> PeerLostError:
        lost = self.lost()
        return PeerLostError(f"{lost.words} before it was ready; start it again", lost.rank)

    def connect(self, group: Group, key: bytes | None) -> None:
        """Connect all ranks, with the key for other hosts; raises PeerLostError as Group."""
        for link in self.links:
            link.within(LIMIT)
            with contextlib.suppress(OSError):
                link.send(json.dumps({"meet": self.address}).encode())
        group.connect(self.address, key)

    def lost(self) -> Loss:
        """The lost rank and its end; waits up to 0.5 s for ranks that noticed the loss to end.

        If all followers report that they have lost another rank, it is this one, which was stopped, unless
        they lost one another.
        """
        until = time.monotonic() + _SETTLE
        while time.monotonic() < until:
            if any(one.ended() and not one.lost_another() for one in self._all):
                break
            time.sleep(0.01)
        found = [one for one in self._all if not one.lost_another()]
        if not found:
            link = "" if len(self._all) == 1 else ", or a link between two of them was cut"
            return Loss(0, f"rank 0 (process {os.getpid()}) did not answer the other ranks in time{link}")
        # Ranks that wait for a stopped rank are silent too.
        one = min(found, key=lambda one: (one.ended() is None, not one.stopped()))
        return Loss(one.rank, f"{one} {one.ended() or 'does not answer'}")

    def close(self) -> None:
        """Close the links, which ends the followers; one that does not end is killed. Never waits."""
        self._processes.close()  # first, so that no end from now on counts as a loss
        if self._listener is not None:
            self._listener.close()

    def _check(self) -> None:
        """Call `on_end` once if a follower has ended."""
        if self.on_end and any(one.ended() for one in self._all) and not self._processes.closing:
            on_end, self.on_end = self.on_end, None
            on_end()
