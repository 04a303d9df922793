"""Files of ours: where they lie, and how they are written whole, read whole and locked."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from specinfer.errors import ModelFileError

_DAY: Final = 86400.0  # seconds


def cache_dir() -> Path:
    """Where files of ours lie: SPECINFER_CACHE, else XDG_CACHE_HOME/specinfer, else ~/.cache/specinfer."""
    own = os.environ.get("SPECINFER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "specinfer"


@contextlib.contextmanager
def locked(path: Path, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """A block that one process at a time is in; the others wait, and call `waits` before they do.

    `path` is made, and stays.

    On a disk that knows no locks nobody waits: two may make the same file, and the later one has its name.
    """
    from filelock import FileLock, Timeout  # setup.py compiles where nothing is installed

    lock = FileLock(path)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if waits is not None:
                waits()
            lock.acquire()
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise
        yield
        return
    try:
        yield
    finally:
        lock.release()


class NewFile:
    """A file that gets its name when it is whole; a context manager that removes what was not kept.

    It grows beside `path`, as PATH.*.partial. What a killed process left of it there is removed after a day.
    All of this raises OSError.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        """`mode` is who may read and write it; its folder must exist."""
        self._path = path
        for remains in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
            with contextlib.suppress(FileNotFoundError):  # somebody else removed it
                if time.time() - remains.stat().st_mtime > _DAY:  # nobody writes at a file for a day
                    remains.unlink()
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
        self._partial = Path(name)
        self._file = os.fdopen(number, "wb", buffering=0)
        if mode != 0o600:
            with contextlib.suppress(OSError):  # a disk without modes: the file is its writer's alone
                os.chmod(self._partial, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # whatever went wrong was said before
            self._file.close()
        with contextlib.suppress(OSError):  # removed with the next file of that name, after a day
            self._partial.unlink(missing_ok=True)

    def seek(self, position: int) -> None:
        """Write at that byte from here on."""
        self._file.seek(position)

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def keep(self, *, through_power_cuts: bool = False) -> None:
        """Give the file its name, in place of what had it.

        A power cut soon after may leave less than was written under it, unless `through_power_cuts`, which
        waits for the disk.
        """
        if through_power_cuts:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)


def write_text(path: Path, text: str) -> None:
    """Put `text` under `path`, whole or not at all, for everybody to read; raises OSError."""
    with NewFile(path, mode=0o644) as new:
        new.write(text.encode())
        new.keep()


def write_whole(path: Path, text: str) -> bool:
    """Put `text` under `path`, which gets its name only when whole; returns whether that could be done.

    For what is made anew where it is missing: a folder that is read-only or full costs nothing else.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(path) as new:
            new.write(text.encode())
            new.keep()
    except OSError:
        return False
    return True


def read_exactly(path: Path, start: int, into: memoryview) -> None:
    """Fill `into`, of bytes, with those of a file from byte `start` on.

    Raises ModelFileError where the file ends before that.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while into:
            count = file.readinto(into)
            if not count:
                raise ModelFileError(f"{path} got shorter while it was read; get it again")
            into = into[count:]
