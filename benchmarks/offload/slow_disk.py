"""A limit on how fast a group reads from a disk, so that figures of different minutes may be compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from memory_group import MemoryGroup, NoGroupError, joining

BLKIO = Path("/sys/fs/cgroup/blkio")
Inside = Callable[[Sequence[str]], list[str]]  # what makes a command run under the limits


@contextmanager
def slow_disk(group: MemoryGroup, rate: int | None, file: Path) -> Iterator[Inside]:
    """Makes commands run in `group`, and read at most `rate` bytes per second from the disk of `file`.

    None is no such limit. Raises NoGroupError where it cannot be set.
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
            with suppress(OSError):  # its last process has not quite ended
                folder.rmdir()
                break
            time.sleep(0.02)
