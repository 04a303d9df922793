"""A group of processes that may take so much memory, and read so fast from the disk: a cgroup, v1 or v2."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

ROOT: Final = Path("/sys/fs/cgroup")
_PATIENCE: Final = 10.0  # seconds for processes of the group to be gone


class NoGroupError(Exception):
    """A limit cannot be made here; the message is one line."""


class MemoryGroup:
    """A group whose processes together take at most `limit` bytes, page cache included.

    Used as a context; its processes end with it. `rate` is the most bytes per second that they read from the
    disk of `file`. Raises NoGroupError where no such group can be made.
    """

    def __init__(self, limit: int, rate: int | None = None, file: Path | None = None) -> None:
        name = f"specinfer-bench-{uuid4().hex[:12]}"
        self._folders: list[Path] = []
        try:
            if (ROOT / "cgroup.controllers").exists():
                self._make(ROOT / name)
                self._write("memory.max", str(limit))
                self._peak, self._kills = "memory.peak", ("memory.events", "oom_kill")
                if self._exists("memory.swap.max"):
                    self._write("memory.swap.max", "0")
            elif (ROOT / "memory").is_dir():
                self._make(ROOT / "memory" / name)
                self._write("memory.limit_in_bytes", str(limit))
                self._peak, self._kills = "memory.max_usage_in_bytes", ("memory.oom_control", "oom_kill")
            else:
                raise NoGroupError(f"no memory cgroups are mounted in {ROOT}")
            if rate is not None and file is not None:
                self._slow_down(name, rate, file)
        except OSError as error:
            self.close()
            raise NoGroupError(f"a memory cgroup cannot be made: {error.strerror} (root is needed)") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command that enters the group, then becomes `command`; it runs nothing if it cannot enter."""
        places = [str(folder / "cgroup.procs") for folder in self._folders]
        enter = " && ".join(f'echo $$ > "{place}"' for place in places)
        return ["/bin/sh", "-c", f'{enter} && exec "$@"', "sh", *command]

    def peak(self) -> int:
        """The most bytes that the group held so far, pages of files included."""
        path = self._folders[0] / self._peak
        return int(path.read_text()) if path.exists() else 0

    def kills(self) -> int:
        """How many of its processes the kernel ended for want of memory."""
        file, name = self._kills
        lines = (self._folders[0] / file).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] == name)

    def close(self) -> None:
        """End what runs in the group, and remove it."""
        for folder in self._folders:
            end = time.monotonic() + _PATIENCE
            while folder.exists() and time.monotonic() < end:
                for pid in (folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                with suppress(OSError):  # somebody is in it still
                    folder.rmdir()
                    break
                time.sleep(0.05)

    def _make(self, folder: Path) -> None:
        folder.mkdir()
        self._folders.append(folder)

    def _write(self, name: str, value: str) -> None:
        (self._folders[-1] / name).write_text(value)

    def _exists(self, name: str) -> bool:
        return (self._folders[-1] / name).exists()

    def _slow_down(self, name: str, rate: int, file: Path) -> None:
        device = os.stat(file).st_dev
        disk = f"{os.major(device)}:{os.minor(device)}"
        if self._exists("io.max"):
            self._write("io.max", f"{disk} rbps={rate}")
        else:
            self._make(ROOT / "blkio" / name)
            self._write("blkio.throttle.read_bps_device", f"{disk} {rate}")
