"""Two nodes connected by a network: network namespaces of this machine, for distributed.py and tests.

    with two_nodes(mbit=1000) as nodes:      makes them and a link of this bandwidth, as root
        with follower(nodes, model, core):   rank 1 of `model` on the second node, on that core
            enter(nodes.here)                moves this process to the first node

The link adds no latency.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specinfer.errors import UserError

MASTER = "10.213.9.1:29500"
_NETWORK = 0x40000000  # CLONE_NEWNET
_BURST = "64kb"  # bytes without a limit


class NoNodesError(UserError):
    """This machine cannot have these nodes."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The names of two namespaces, and a file with a key."""

    here: str
    there: str
    key_file: str


@contextmanager
def two_nodes(mbit: int = 0) -> Iterator[Nodes]:
    """Make two nodes and a link of `mbit` megabits per second each way; 0: no limit."""
    names = [f"specinfer-{which}-{os.getpid()}" for which in ("here", "there")]
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(16))
        try:
            for name in names:
                call("ip", "netns", "add", name)
            cable = ("type", "veth", "peer", "name", "end1", "netns", names[1])
            call("ip", "link", "add", "name", "end0", "netns", names[0], *cable)
            for number, name in enumerate(names):
                end = f"end{number}"
                call("ip", "-n", name, "address", "add", f"10.213.9.{number + 1}/24", "dev", end)
                call("ip", "-n", name, "link", "set", end, "up")
                call("ip", "-n", name, "link", "set", "lo", "up")
                if mbit:
                    shaped = ("root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", "50ms")
                    call("tc", "-n", name, "qdisc", "add", "dev", end, *shaped)
            yield Nodes(names[0], names[1], str(key))
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def follower(nodes: Nodes, model: str, core: int) -> Iterator[None]:
    """Run rank 1 of a model on the second node, which waits for an engine on the first."""
    inside = ["ip", "netns", "exec", nodes.there, "taskset", "-c", str(core)]
    follow = [sys.executable, "-m", "specinfer", "follow", model, "--rank", "1"]
    process = subprocess.Popen([*inside, *follow, "--master", MASTER, "--key-file", nodes.key_file])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def enter(node: str) -> None:
    """Move this process to a node."""
    number = os.open(f"/run/netns/{node}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(number, _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {node}")
    finally:
        os.close(number)


def call(*words: str) -> None:
    """Run a command; raises NoNodesError with its output if it fails."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoNodesError(f"{' '.join(words)}: {done.stderr.strip()}; network namespaces need root")
