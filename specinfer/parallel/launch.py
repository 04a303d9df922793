"""Followers: the processes of ranks 1, 2, ..., from their start to their end.

    rank 0                                       a follower (parallel/follower.py)
    starts it, a socket for its link,            ends when the link or its parent does
    or lets it in at its door               <--  on another host (parallel/door.py)
    settings: the kind, kernels             -->
                                            <--  what it has loaded and runs on, or why it cannot
    let us meet (parallel/meeting.py)       -->
    messages of runtime/sharded.py          -->

On one host nothing has a name or a port that is fixed: the socket is inherited.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from specinfer.errors import ModelError, PeerLostError
from specinfer.parallel.door import PEER_LOST, Door, spawn
from specinfer.parallel.group import LIMIT, Group, Loss
from specinfer.parallel.link import Link
from specinfer.parallel.meeting import HERE
from specinfer.version import VERSION

_GRACE: Final = 1.0  # seconds for followers to end by themselves
_LOOK: Final = 0.5  # seconds after which it is looked again whether all of them live
_HEARD: Final = 0.5  # seconds within which those end that have noticed a loss
_LOADING: Final = 600.0  # seconds that a follower may take to load after this rank has
_COMING: Final = 600.0  # seconds that followers of other hosts are waited for


class _Follower:
    """One of them, as rank 0 knows it."""

    def __init__(self, rank: int, link: Link, host: str, process: subprocess.Popen[bytes] | None) -> None:
        self.rank = rank
        self.link = link
        self.host = host
        self._process = process  # None: it is on another host
        hosts = link.hosts
        self._where = f"process {process.pid}" if process else f"on {hosts[1]}" if hosts else "elsewhere"

    def __str__(self) -> str:
        """Which one it is."""
        return f"rank {self.rank} ({self._where})"

    def ended(self) -> str | None:
        """How it has ended; None where it has not, as far as is known."""
        if self._process is None:
            return "has closed its link, or its host has gone" if self.link.ended() else None
        status = self._process.poll()
        return None if status is None else f"has ended with status {status}"

    def lost_another(self) -> bool:
        """Whether it ends because it has lost another rank."""
        if self._process is not None:
            return self.link.lost_another or self._process.poll() == PEER_LOST
        self.link.within(0)
        with contextlib.suppress(EOFError, OSError, ValueError):
            while not self.link.lost_another:
                self.link.receive()
        return self.link.lost_another

    def stopped(self) -> bool:
        """Whether it is known to be stopped, by a signal say."""
        try:
            found = None if self._process is None else psutil.Process(self._process.pid).status()
        except psutil.Error:
            return False
        return bool(found == psutil.STATUS_STOPPED)

    def end(self, until: float) -> None:
        """See that a process of this host ends: it is killed when its time is over."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Followers:
    """Ranks 1 .. size - 1."""

    def __init__(self, count: int, model: Path, memory: Mapping[int, int], door: Door | None = None) -> None:
        """Those that `door` lets in are waited for, the other ones of `count` are started, and load `model`.

        These inherit files of `memory`, by the first rank of the stage that shares each. Raises OSError where
        one cannot be started, PeerLostError where one does not come in.
        """
        self._model, self._memory, self._door = model, memory, door
        self._all: list[_Follower] = []
        self._started, self._closing = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        self.on_end: Callable[[], object] | None = None  # called once when one has ended before `close`
        here = count if door is None else count - len(door.ranks)
        # Linux takes the end of the thread that has started a process for the end of its parent.
        self._keeper = threading.Thread(target=self._keep, args=(here,), daemon=True)
        self._keeper.start()
        self._started.wait()
        try:
            if self._failure is not None:
                raise self._failure
            guests = {} if door is None else door.wait(_COMING)
            self._all += [_Follower(rank, one.link, one.host, None) for rank, one in sorted(guests.items())]
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> list[str]:
        """Where ranks 0, 1, ... are: those that share memory have the same text, "" those of this host."""
        return ["", *(one.host for one in self._all)]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the hosts of ranks 0, 1, ..., "" of this one."""
        pairs = [link.hosts for link in self.links]
        return ["", *("" if pair is None or pair[0] == pair[1] else pair[1] for pair in pairs)]

    def tell(self, settings: Sequence[Mapping[str, object]]) -> None:
        """Have each load what its settings say (parallel/follower.py); JSON holds them."""
        for one, given in zip(self._all, settings, strict=True):
            with contextlib.suppress(OSError):  # it has ended, as `ready` will tell
                one.link.send(json.dumps({**given, "version": VERSION}).encode())

    @property
    def links(self) -> list[Link]:
        """Those to ranks 1, 2, ..."""
        return [one.link for one in self._all]

    @property
    def address(self) -> str:
        """This host's address, as ranks of other hosts see it."""
        return next((link.hosts[0] for link in self.links if link.hosts is not None), HERE)

    def ready(self, identity: Mapping[str, str]) -> list[int]:
        """Wait until all have loaded; they must run what this rank runs. How much memory is free at each.

        Raises ModelError where one of them cannot, or is another (its code, its kernels, its file), and
        PeerLostError where one ends or takes too long.
        """
        free: list[int] = []
        for one in self._all:
            one.link.within(_LOADING)
            try:
                said: Any = json.loads(one.link.receive())
            except (EOFError, OSError, ValueError) as error:
                lost = self.lost()
                raise PeerLostError(f"{lost.words} before it was ready; start it again", lost.rank) from error
            if "failed" in said:
                raise ModelError(f"rank {one.rank} cannot load the model: {said['failed']}")
            others = [name for name, value in identity.items() if said["identity"].get(name) != value]
            if others:
                raise ModelError(
                    f"rank {one.rank} has another {' and '.join(others)} than rank 0; all ranks must run the "
                    "same: start them from one installation and one model"
                )
            free.append(int(said["free"]))
        return free

    def meet(self, group: Group, key: bytes | None) -> None:
        """Have all ranks meet, those of other hosts with this key; raises PeerLostError as Group."""
        for link in self.links:
            link.within(LIMIT)
            with contextlib.suppress(OSError):
                link.send(json.dumps({"meet": self.address}).encode())
        group.connect(self.address, key)

    def lost(self) -> Loss:
        """Which rank is lost, and how; waits a moment for those to end that have noticed it."""
        until = time.monotonic() + _HEARD
        while time.monotonic() < until:
            if any(one.ended() and not one.lost_another() for one in self._all):
                break
            time.sleep(0.01)
        ended = [one for one in self._all if one.ended()]
        guilty = [one for one in ended if not one.lost_another()]
        silent = [one for one in self._all if one not in ended]
        # Those that wait for a rank that is stopped say nothing, either, or that they have lost one.
        silent.sort(key=lambda one: (one.lost_another(), not one.stopped()))
        one = [*guilty, *silent, *ended][0]
        return Loss(one.rank, f"{one} {one.ended() or 'does not answer'}")

    def close(self) -> None:
        """Close the links, whereupon followers end; one that does not is killed. Never waits."""
        self._closing.set()  # first: no end from now on is a loss
        if self._door is not None:
            self._door.close()
        for link in self.links:
            link.close()

    def wait(self) -> None:
        """Wait until all of this host have ended, after `close`."""
        self._keeper.join()

    def _keep(self, count: int) -> None:
        """The thread that starts those of this host, and sees all of them end."""
        try:
            for rank in range(1, count + 1):
                ours, its = socket.socketpair()
                with its:
                    process = spawn(its.fileno(), self._model, self._memory)
                self._all.append(_Follower(rank, Link(ours), "", process))
        except OSError as error:
            self._failure = error
        self._started.set()
        while not self._closing.wait(_LOOK):
            if any(one.ended() for one in self._all) and self.on_end and not self._closing.is_set():
                self.on_end()
                self._closing.wait()
        until = time.monotonic() + _GRACE
        for one in self._all:
            one.end(until)
