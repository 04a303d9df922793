"""Ray cluster that replicas run on, as seen by the server process, which never loads ray.

RAY_ADDRESS selects the cluster; by default it is the one that `ray start` started on this host.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError

_MODULE: Final = "specinfer.serve.backend.ray_relay"
_QUERY: Final = ["-m", _MODULE]  # arguments of Python, before the address
_ANSWERING: Final = 60.0  # seconds in which a cluster has to list its nodes
_REACHING: Final = 5.0  # seconds in which its head has to accept a connection
# Environment of the processes that use Ray: no usage reports, and Ray's own log files get errors only.
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a process that lost its cluster does not start another
}
_NO_CLUSTER: Final = (
    "start one with `ray start --head`, or set RAY_ADDRESS to HOST:PORT of one with this host"
)


class Cluster:
    """Cluster with room for the server's replicas."""

    def __init__(self, engine: EngineConfig, count: int) -> None:
        """Find the cluster, which needs room for `count` replicas of `engine`.

        Raises ConfigError if ray is not installed, there is no cluster, or it does not answer or has too few
        free CPUs.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "ray is not installed; --cluster ray needs it: pip install 'specinfer[cluster]'"
            )
        self.env = {**os.environ, **_QUIET}
        ranks, threads = engine.ranks, engine.threads
        required = None if threads is None else threads * ranks
        self._cpus = cpus_of_each(self._free_cpus(), count, ranks, required)

    @property
    def relay(self) -> tuple[str, ...]:
        """Module that relays a replica's messages to its actor, and the last arguments of its process."""
        return (_MODULE, configured_address(), str(self._cpus))

    def _free_cpus(self) -> list[float]:
        """Free CPUs by node, from a process that queries the cluster."""
        address = configured_address()
        reach(address)
        query, said = [sys.executable, *_QUERY, address], ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                query, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_ANSWERING
            )
            said = ended.stdout.decode(errors="replace").strip()
            if ended.returncode == 0:
                return list(json.loads(said))
        raise ConfigError(said or f"the Ray cluster at {address} does not answer; see Ray's own logs")


def configured_address() -> str:
    """HOST:PORT of the cluster that RAY_ADDRESS or `ray start` names.

    Raises ConfigError if there is none, or if RAY_ADDRESS has another form.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address not in ("", "auto"):
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}; allowed: HOST:PORT of a cluster that includes this host, "
                "or auto"
            )
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # Ray's search order
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        raise ConfigError(f"no Ray cluster runs on this host; {_NO_CLUSTER}") from None


def reach(address: str) -> None:
    """Raise ConfigError if no process listens at an address; Ray itself would retry for a long time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHING).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); {_NO_CLUSTER}"
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
