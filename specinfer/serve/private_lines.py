"""PrivateLines: a file of lines that only its owner may read, kept within a size."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import Final

_PRIVATE: Final = 0o600
_HOW: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class PrivateLines:
    """Appends lines to the file `path`; before it grows beyond `most` bytes it becomes PATH.1.

    What a killed process left of a line stays, and the next line begins behind it on its own. Where the file
    is moved or removed meanwhile, the next line begins a new one. Nobody else may append to it. A symbolic
    link is refused, as its target may be somebody else's file. All of this raises OSError.
    """

    def __init__(self, path: str, most: int) -> None:
        """Open the file, made where it is missing."""
        self._path = path
        self._most = most
        self._whole = True  # whether it ends with a whole line
        self._number: int | None = None  # of its descriptor; None: it is opened with the next line
        self._open()

    def append(self, line: bytes) -> None:
        """Write a line; one that does not fit on the disk leaves nothing behind."""
        number = self._open()
        data = line + b"\n"
        size = os.fstat(number).st_size
        if size and size + len(data) > self._most:
            self.close()
            os.replace(self._path, f"{self._path}.1")
            number, size = self._open(), 0
        left = memoryview(data if self._whole else b"\n" + data)
        try:
            while left:
                left = left[os.write(number, left) :]
        except OSError:
            with suppress(OSError):  # then it is looked at when it is opened again
                os.ftruncate(number, size)
            self.close()
            raise
        self._whole = True

    def close(self) -> None:
        """Close the file; the next line would open it again."""
        if self._number is not None:
            number, self._number = self._number, None
            os.close(number)

    def _open(self) -> int:
        if self._number is not None:
            if self._is_there(self._number):
                return self._number
            self.close()
        try:
            number = os.open(self._path, _HOW, _PRIVATE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a symbolic link") from None
            raise
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if stat.S_IMODE(found.st_mode) != _PRIVATE:
                os.fchmod(number, _PRIVATE)
            _lock(number)
            self._whole = not found.st_size or os.pread(number, 1, found.st_size - 1) == b"\n"
        except BaseException:
            os.close(number)
            raise
        self._number = number
        return number

    def _is_there(self, number: int) -> bool:
        """Whether the open file is still the one of that path."""
        try:
            return os.path.samestat(os.fstat(number), os.lstat(self._path))
        except FileNotFoundError:
            return False


def _lock(number: int) -> None:
    """Keep others from writing to the same file, which would rotate lines of ours away."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another server writes it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
