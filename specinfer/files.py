"""Cache folder, and atomic writing, exact reading and locking of files."""

import contextlib
import errno
import glob
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from specinfer.errors import ConfigError, ModelFileError

_PIECE: Final = 1 << 20  # bytes per read
_DAY: Final = 86400.0  # seconds


def cache_dir() -> Path:
    """Return the cache folder: SPECINFER_CACHE, else XDG_CACHE_HOME/specinfer, else ~/.cache/specinfer."""
    own = os.environ.get("SPECINFER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "specinfer"


@contextlib.contextmanager
def locked(path: Path, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file lock during the block; a process that has to wait calls `waits` first.

    Creates `path` and leaves it there. On a file system without locks the block runs unlocked: two processes
    may then write the same file, and the later one replaces the earlier.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError:  # setup.py compiles where nothing is installed
        yield
        return
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
    """A file that is written as PATH.*.partial and renamed to PATH by `keep`.

    A context manager: leaving the block without `keep` removes the partial file. If the file system allows
    it, the partial file has no name until `keep`, so that a killed process leaves nothing. Otherwise the
    next NewFile of the same path removes partial files that are older than a day. Methods raise OSError.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        """Create the partial file in the existing folder of `path`, with the permission bits `mode`."""
        self._path = path
        self._partial: Path | None = None
        for remains in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                if time.time() - remains.stat().st_mtime > _DAY:  # no write takes a day
                    remains.unlink()
        try:
            number = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o600)
        except (AttributeError, OSError):  # not on this system
            number, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
            self._partial = Path(name)
        self._file = os.fdopen(number, "wb", buffering=0)
        if mode != 0o600:
            with contextlib.suppress(OSError):  # a file system without permission bits
                os.fchmod(number, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the write has already raised
            self._file.close()
        with contextlib.suppress(OSError):  # a later NewFile removes it after a day
            if self._partial is not None:
                self._partial.unlink(missing_ok=True)

    def seek(self, position: int) -> None:
        """Set the byte position of the next write."""
        self._file.seek(position)

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def keep(self) -> None:
        """Close the file and rename it to its path, replacing an existing file.

        The data is not synced to the disk: a power cut soon afterwards may leave a truncated file.
        """
        if self._partial is None:
            with tempfile.TemporaryDirectory(dir=self._path.parent, prefix=f"{self._path.name}.") as folder:
                named = Path(folder) / self._path.name
                number = self._file.fileno()
                # With a descriptor of a folder, which an absolute path ignores, Python follows the link.
                os.link(f"/proc/self/fd/{number}", named, src_dir_fd=number)
                self._file.close()
                os.replace(named, self._path)
            return
        self._file.close()
        os.replace(self._partial, self._path)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` to `path` atomically, by default readable by every user; raises OSError."""
    with NewFile(path, mode) as new:
        new.write(text.encode())
        new.keep()


def write_whole(path: Path, text: str) -> bool:
    """Write `text` to `path` atomically; return False if the disk refuses it.

    For files that can be made again when they are missing, so that a read-only or full folder is no error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, mode=0o600)
    except OSError:
        return False
    return True


def check_writable(path: Path) -> None:
    """Raise ConfigError if `path` cannot be written; called before minutes of measurement."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: the folder is not writable; choose another")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` to `path`, whole or not at all; raises ConfigError if writing fails."""
    try:
        write_text(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_exactly(path: Path, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of a file from byte `start` on.

    Raises ModelFileError if the file ends too early, OSError if it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while into:
            count = file.readinto(into)
            if not count:
                raise ModelFileError(f"{path} became shorter while it was read; download it again")
            into = into[count:]


def read_by_pieces(path: Path, start: int, into: memoryview) -> None:
    """As read_exactly, through memory that stays in a CPU's cache.

    Reading directly into untouched large pages took longer in a virtual machine.
    """
    piece = memoryview(bytearray(min(_PIECE, len(into))))
    for at in range(0, len(into), _PIECE):
        part = piece[: len(into) - at]
        read_exactly(path, start + at, part)
        into[at : at + len(part)] = part
