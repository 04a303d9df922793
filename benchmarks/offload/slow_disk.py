"""Limits a group's disk reads per second, so that figures of different minutes are comparable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.machines.memory_group import MemoryGroup, NoGroupError, joining

BLKIO = Path("/sys/fs/cgroup/blkio")
Inside = Callable[[Sequence[str]], list[str]]  # wraps a command so that it runs under the limits


@contextmanager
def slow_disk(group: MemoryGroup, rate: int | None, file: Path) -> Iterator[Inside]:
    """Yield a function that makes commands run in `group` with at most `rate` bytes read per second.

    The limit is for the disk of `file`; None: no limit. Raises NoGroupError if it cannot be set.
    """
    if rate is None:
        yield group.inside
        return
    device = os.stat(file).st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    folder = group.folder if (group.folder / "io.max").exists() else BLKIO / group.folder.name
    try:
        if folder == group.folder:
            (folder / "io.max").write_text(f"{disk} rbps={rate}")
        else:
            folder.mkdir()
            (folder / "blkio.throttle.read_bps_device").write_text(f"{disk} {rate}")
    except OSError as error:
        raise NoGroupError(f"{folder}: the disk cannot be slowed down ({error.strerror})") from None
    if folder == group.folder:
        yield group.inside
        return
    try:
        yield lambda args: joining(folder, group.inside(args))
    finally:
        group.kill()
        for _ in range(100):
            with suppress(OSError):  # its last process is still ending
                folder.rmdir()
                break
            time.sleep(0.02)
