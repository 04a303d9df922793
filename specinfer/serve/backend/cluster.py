"""Ray cluster that replicas run on, as seen by the server process, which never loads ray.

RAY_ADDRESS selects the cluster; by default it is the one that `ray start` started on this host. If there is
none, a child process (ray_relay.py) runs a private cluster on the loopback address until the server ends.
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
from typing import Final, Self

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MODULE: Final = "specinfer.serve.backend.ray_relay"
_STARTING: Final = 60.0  # seconds in which a cluster has to start, or to list its nodes
_ENDING: Final = 15.0  # seconds in which a private cluster has to end
_REACHING: Final = 5.0  # seconds in which its head has to accept a connection
# Environment of the processes that use Ray: no usage reports, and Ray's own log files get errors only.
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a process that lost its cluster does not start another
}


class Cluster:
    """Cluster given by the user, or a private one that the server starts and ends.

    As a context manager it closes with the block.
    """

    def __init__(self, engine: EngineConfig, count: int) -> None:
        """Find or start the cluster, which needs room for `count` replicas of `engine`.

        Raises ConfigError if ray is not installed, the cluster does not answer or has too few free CPUs.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "ray is not installed; --cluster ray needs it: pip install 'specinfer[cluster]'"
            )
        self._own = not configured_address()
        self._address = ""  # of a private cluster
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runner: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self.env = {**os.environ, **_QUIET}
        if self._own:
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            self.env |= {"RAY_memory_monitor_refresh_ms": "0"}  # as for replicas without a cluster
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

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def relay(self) -> tuple[str, ...]:
        """Module that relays a replica's messages to its actor, and the last arguments of its process."""
        return (_MODULE, self._address if self._own else configured_address(), str(self._cpus))

    def revive(self) -> None:
        """Restart a private cluster that has ended; raises ConfigError if it does not start."""
        with self._starting:
            if self._own and (self._runner is None or self._runner.poll() is not None):
                _LOG.error("the private Ray cluster of this server has ended; it is restarted")
                self._start()

    def close(self) -> None:
        """End a private cluster."""
        with self._starting:
            self._end()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> list[float]:
        """Start the process that runs a private cluster or queries a given one; returns free CPUs by node."""
        address = "" if self._own else configured_address()
        if address:
            reach(address)
        parent, child = socket.socketpair()
        with child:
            self._runner = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(child.fileno()), address or f"={self._folder_name}"],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                env=self.env,
                start_new_session=True,  # Ctrl-C is for the server, whose replicas end first
            )
        self._link = Connection(parent.detach())
        try:
            if not self._link.poll(_STARTING):
                raise EOFError
            failure, self._address, free = self._link.recv()
        except (EOFError, OSError):
            self._end()
            which = f"Ray cluster at {address}" if address else "private Ray cluster of this server"
            raise ConfigError(f"the {which} does not answer; see Ray's own logs") from None
        if failure or not self._own:
            self._end()
        if failure:
            raise ConfigError(failure)
        return list(free)

    @property
    def _folder_name(self) -> str:
        return "" if self._folder is None else self._folder.name

    def _end(self) -> None:
        if self._runner is None:
            return
        self._link.close()
        try:
            self._runner.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._runner.kill()
            self._runner.wait()
        self._runner = None


def configured_address() -> str:
    """HOST:PORT of the cluster that RAY_ADDRESS or `ray start` names; empty if there is none.

    Raises ConfigError if RAY_ADDRESS has another form.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "local":
        return ""
    if address not in ("", "auto"):
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}; allowed: HOST:PORT of a cluster that includes this host, "
                "auto, or local for a private cluster"
            )
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # Ray's search order
    with contextlib.suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    return ""


def reach(address: str) -> None:
    """Raise ConfigError if no process listens at an address; Ray itself would retry for a long time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHING).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start it with `ray start "
            "--head`, or set RAY_ADDRESS to another one or to local"
        ) from None


def cpus_of_each(free: Sequence[float], count: int, ranks: int, required: int | None = None) -> int:
    """CPUs for each of `count` replicas, on nodes with `free` CPUs.

    Returns `required` if given, else the largest number with which all replicas fit, at least one per rank.
    A replica runs on one node. Raises ConfigError if the replicas do not fit.
    """

    def room(cpus: int) -> int:
        return sum(int(node // cpus) for node in free)

    sizes = range(int(max(free, default=0)), ranks - 1, -1) if required is None else [required]
    for cpus in sizes:
        if room(cpus) >= count:
            return cpus
    min_cpus = ranks if required is None else required
    nodes = ", ".join(f"{node:g}" for node in free) or "0"
    raise ConfigError(
        f"--replicas {count} with at least {min_cpus} CPUs each do not fit into the Ray cluster: its nodes "
        f"have {nodes} free CPUs, room for {room(min_cpus)}; give fewer replicas, threads or ranks, "
        "or add nodes"
    )
