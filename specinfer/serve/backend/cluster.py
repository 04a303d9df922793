"""Cluster: the Ray cluster that replicas run on, as the server's own process knows it; it never loads ray.

It is the one of RAY_ADDRESS or the one that `ray start` told of on this host. Where there is none, a process
keeps one for this server alone, on this host and its loopback address, which ends with the server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MODULE: Final = "specinfer.serve.backend.ray_relay"
_STARTING: Final = 60.0  # seconds that a cluster may take to start, or to tell of its nodes
_ENDING: Final = 15.0  # seconds that one may take to end
_REACHING: Final = 5.0  # seconds within which its head has to take a connection
# Of processes that talk to Ray: nothing is told to its makers, and their own logs are Ray's files.
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # none starts a cluster unasked where it has lost one
}


class Cluster:
    """The cluster, from the search for it to its end where it is this server's own.

    As a context manager it ends with the block.
    """

    def __init__(self, engine: EngineConfig, count: int) -> None:
        """Find or start the cluster, which has to have room for `count` replicas of `engine`.

        Raises ConfigError where ray is not installed, the cluster does not answer or has too few free CPUs.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "ray is not installed; --cluster ray needs it: pip install 'specinfer[cluster]'"
            )
        self._own = not given_address()
        self._address = ""  # of one's own
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self.env = {**os.environ, **_QUIET}
        if self._own:
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            self.env |= {"RAY_memory_monitor_refresh_ms": "0"}  # replicas of one host have none either
            self._folder = tempfile.TemporaryDirectory(prefix="specinfer-ray-", ignore_cleanup_errors=True)
        try:
            free = self._start()
            ranks, threads = engine.ranks, engine.threads
            self._cpus = cpus_of_each(free, count, ranks, None if threads is None else threads * ranks)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def relay(self) -> tuple[str, ...]:
        """The module of a process that brings a replica's messages to its actor, and its last arguments."""
        return (_MODULE, self._address if self._own else given_address(), str(self._cpus))

    def revive(self) -> None:
        """Start a cluster of one's own again where it has ended; raises ConfigError where it cannot be."""
        with self._starting:
            if self._own and (self._keeper is None or self._keeper.poll() is not None):
                _LOG.error("the Ray cluster of this server has ended and is started again")
                self._start()

    def close(self) -> None:
        """End the cluster, where it is one's own."""
        with self._starting:
            self._end()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> list[float]:
        """Start the process that keeps the cluster, or asks it; returns the free CPUs of its nodes."""
        address = "" if self._own else given_address()
        if address:
            reach(address)
        ours, its = socket.socketpair()
        with its:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(its.fileno()), address or f"={self._folder_name}"],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env=self.env,
                start_new_session=True,  # Ctrl-C is for the server, whose replicas end first
            )
        self._link = Connection(ours.detach())
        try:
            if not self._link.poll(_STARTING):
                raise EOFError
            failure, self._address, free = self._link.recv()
        except (EOFError, OSError):
            self._end()
            which = f"at {address}" if address else "of this server's own"
            raise ConfigError(f"the Ray cluster {which} does not answer; see Ray's own logs") from None
        if failure or not self._own:
            self._end()
        if failure:
            raise ConfigError(failure)
        return list(free)

    @property
    def _folder_name(self) -> str:
        return "" if self._folder is None else self._folder.name

    def _end(self) -> None:
        if self._keeper is None:
            return
        self._link.close()
        try:
            self._keeper.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper = None


def given_address() -> str:
    """HOST:PORT of the cluster that RAY_ADDRESS or `ray start` names; nothing where there is none.

    Raises ConfigError where RAY_ADDRESS is no such address.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "local":
        return ""
    if address not in ("", "auto"):
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}; allowed: HOST:PORT of a cluster of which this host is a node, "
                "auto, or local for one of this server's own"
            )
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray looks for it
    with contextlib.suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    return ""


def reach(address: str) -> None:
    """Raise ConfigError where nobody listens at an address; Ray would try for a long time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHING).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start it with `ray start "
            "--head`, or set RAY_ADDRESS to another one or to local"
        ) from None


def cpus_of_each(free: Sequence[float], count: int, ranks: int, wanted: int | None = None) -> int:
    """How many CPUs each of `count` replicas gets, of nodes with so many free ones.

    Those that are `wanted`; by default the most with which all replicas have room, at least one a rank. A
    replica is on one node. Raises ConfigError where there is no room.
    """

    def room(cpus: int) -> int:
        return sum(int(node // cpus) for node in free)

    sizes = range(int(max(free, default=0)), ranks - 1, -1) if wanted is None else [wanted]
    for cpus in sizes:
        if room(cpus) >= count:
            return cpus
    least = ranks if wanted is None else wanted
    nodes = ", ".join(f"{node:g}" for node in free) or "none"
    raise ConfigError(
        f"--replicas {count} of at least {least} CPUs each do not fit into the Ray cluster: its nodes have "
        f"{nodes} free, room for {room(least)}; give fewer replicas, threads or ranks, or add nodes"
    )
