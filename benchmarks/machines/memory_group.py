"""Runs commands in a memory cgroup, where the kernel kills them above a limit.

    with memory_group(2 << 30) as group:
        ran = group.run([sys.executable, "-m", "specinfer", "generate", ...])
    assert ran.oom_kills == 0

It supports cgroup version 1 (memory.limit_in_bytes) and 2 (memory.max), and needs permission to create
groups, as root has. Tests use it, too: `from benchmarks.machines.memory_group import memory_group`.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specinfer.errors import UserError

_EVERY: Final = 0.01  # seconds between samples of resident memory
_NUMBERS = itertools.count()
# A process joins the group before it becomes the command, so all of its memory counts.
_JOIN: Final = 'echo $$ > "$0" && exec "$@"'


class NoGroupError(UserError):
    """No memory group can be made here; the message is the reason."""


@dataclass(frozen=True)
class Ran:
    """The end of a command, and its memory."""

    returncode: int  # -9 if the kernel killed it for its memory
    stdout: str
    stderr: str
    peak_usage: int  # peak of charged bytes, cached file pages included
    peak_resident: int  # peak of its resident bytes, sampled every 10 ms
    oom_kills: int


@dataclass(frozen=True)
class _Names:
    """File names of a group in one cgroup version."""

    limit: str
    swap: str  # a limit that disables swapping
    usage: str
    peak: str
    resident: str  # in memory.stat
    events: str


_V1: Final = _Names(
    *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes"),
    *("memory.max_usage_in_bytes", "total_rss", "memory.oom_control"),
)
_V2: Final = _Names("memory.max", "memory.swap.max", "memory.current", "memory.peak", "anon", "memory.events")


class MemoryGroup:
    """A group with a limit; runs one command at a time."""

    def __init__(self, folder: Path, names: _Names, limit: int) -> None:
        """Set the limit of the new group at `folder`; raises OSError."""
        self.folder, self._names = folder, names
        (folder / names.limit).write_text(str(limit))
        with suppress(OSError):  # a kernel without swap accounting
            (folder / names.swap).write_text(str(limit if names is _V1 else 0))

    def run(self, args: Sequence[str], *, timeout: float | None = None, cwd: Path | None = None) -> Ran:
        """Run a command in the group and wait for it.

        Raises subprocess.TimeoutExpired after `timeout` seconds, when all its processes have ended.
        """
        with suppress(OSError):  # the previous command's peak; version 2 resets it by any text
            (self.folder / self._names.peak).write_text("0")
        kills = self._count(self._names.events, "oom_kill")
        ended = threading.Event()
        seen = [0, 0]  # usage, resident
        watch = threading.Thread(target=self._watch, args=(seen, ended), daemon=True)
        with subprocess.Popen(
            self.inside(args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        ) as process:
            watch.start()
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            finally:
                ended.set()
                watch.join()
                self.kill()
        return Ran(
            process.returncode,
            stdout,
            stderr,
            max(seen[0], self._number(self._names.peak)),
            seen[1],
            self._count(self._names.events, "oom_kill") - kills,
        )

    def inside(self, args: Sequence[str]) -> list[str]:
        """Return a command that joins the group and becomes `args`, or fails."""
        return ["/bin/sh", "-c", _JOIN, str(self.folder / "cgroup.procs"), *args]

    def kill(self) -> None:
        """Kill every process of the group."""
        for _ in range(100):
            left = self._read("cgroup.procs").split()
            if not left:
                return
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            time.sleep(0.02)

    def _watch(self, seen: list[int], ended: threading.Event) -> None:
        while True:
            seen[0] = max(seen[0], self._number(self._names.usage))
            seen[1] = max(seen[1], self._count("memory.stat", self._names.resident))
            if ended.wait(_EVERY):
                return

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except OSError:  # an older kernel
            return ""

    def _number(self, name: str) -> int:
        text = self._read(name).strip()
        return int(text) if text.isdecimal() else 0

    def _count(self, name: str, key: str) -> int:
        found = [line.split()[1] for line in self._read(name).splitlines() if line.split()[0] == key]
        return int(found[0]) if found else 0


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Make a group whose processes may use `limit` bytes in total, cached file pages included.

    The end of the block kills its processes and removes it. Raises NoGroupError if no group can be made.
    """
    group = _made(limit)
    try:
        yield group
    finally:
        group.kill()
        for _ in range(100):
            try:
                group.folder.rmdir()
                break
            except OSError:  # its last process is still ending
                time.sleep(0.02)
        else:
            group.folder.rmdir()


def _made(limit: int) -> MemoryGroup:
    """Return a new group; raises NoGroupError."""
    reasons = []
    for parent, names in _parents():
        folder = parent / f"specinfer-{os.getpid()}-{next(_NUMBERS)}"
        try:
            if names is _V2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            return MemoryGroup(folder, names, limit)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            with suppress(OSError):
                folder.rmdir()
    raise NoGroupError("; ".join(reasons) or "no memory cgroup is mounted")


def _parents() -> list[tuple[Path, _Names]]:
    """Return possible parent groups: the process's own, so that its limits apply, else the top."""
    found, memberships = [], Path("/proc/self/cgroup")
    for line in memberships.read_text().splitlines() if memberships.exists() else ():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, names = Path("/sys/fs/cgroup/memory"), _V1
        elif not controllers:
            top, names = Path("/sys/fs/cgroup"), _V2
        else:
            continue
        found += [(path, names) for path in dict.fromkeys((top / own.lstrip("/"), top)) if path.is_dir()]
    return found
