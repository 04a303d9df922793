"""Files that stream from the disk into memory of ours, and how fast they do.

A file that is larger than memory must not pass through the page cache: the cache would take the memory that
layers are pinned in, and it keeps the pages that are needed last. So a file is read with O_DIRECT where its
disk allows that; elsewhere each piece leaves the cache as soon as it was read.

How many readers of which size are the fastest differs from disk to disk, by a factor of two in both
directions, so half a second of trials decides at each start.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from specinfer.errors import ModelFileError, ensure

PAGE: Final = 4096  # bytes: offsets, lengths and addresses of reads are multiples of it
_MIB: Final = 1 << 20
# Bytes after which all of a file leaves the page cache: what the system has read ahead of one reader may come
# back behind another that had dropped it. To do that more often takes half of the speed.
_SWEPT: Final = 32 * _MIB
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)  # a file system without O_DIRECT
# Readers and bytes of a piece: of several that are about as fast the first is taken. A large piece comes
# before a small one: behind each a reader waits up to 5 ms for the interpreter while others run Python.
SETTINGS: Final = ((1, 16 * _MIB), (1, 4 * _MIB), (2, 4 * _MIB), (4, _MIB), (8, _MIB))
_WORTH: Final = 1.05  # times as fast as a setting before it a later one has to be
_ROUNDS: Final = 2  # of all settings, so that a disturbance does not hit a single one
_ROOM: Final = 64 * _MIB  # that trials read into: more than caches hold, as layers are
_LOG = logging.getLogger(__name__)


class Readable(Protocol):
    """Whatever records are read from; any thread may read."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    @property
    def direct(self) -> bool:
        """Whether reads pass by the page cache."""
        ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on."""
        ...

    def check(self) -> None:
        """Raise ModelFileError unless the file is the one that was opened."""
        ...


class StreamSource:
    """A file that is read in pieces into page-aligned memory, by any number of threads.

    It stays open as long as somebody holds the source: a thread that is stuck in a read keeps it, so its
    number cannot come to stand for another file.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; raises ModelFileError where that cannot be done."""
        self.path = path
        try:
            number = _open_direct(path)
            self.direct = number is not None
            self._number = os.open(path, os.O_RDONLY) if number is None else number
            weakref.finalize(self, os.close, self._number).atexit = False
            self._state = _state(os.fstat(self._number))
        except OSError as error:
            raise ModelFileError(
                f"{path} cannot be opened ({error.strerror}); load the model again"
            ) from error
        self.size = self._state[-1]
        self._read = 0  # bytes since all of the file left the page cache
        self._forget(0, 0)
        if not self.direct:
            _LOG.info("%s: this file system has no O_DIRECT; each piece leaves the page cache again", path)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`, of bytes, with those of the file from `offset` on.

        The address, the length and `offset` are multiples of PAGE. Raises ModelFileError where the file ends
        before that or the disk fails.
        """
        ensure(offset % PAGE == 0 and len(view) % PAGE == 0, "a read begins and ends at whole pages")
        try:
            while view:
                count = os.preadv(self._number, [view], offset)
                self._forget(offset, count)
                view, offset = view[count:], offset + count
                if not count:
                    raise ModelFileError(
                        f"{self.path} ended at byte {offset} while it was read; load the model again"
                    )
        except OSError as error:
            raise ModelFileError(
                f"{self.path} cannot be read at byte {offset} ({error.strerror}); check the disk it is on"
            ) from error

    def check(self) -> None:
        """Raise ModelFileError unless the path still leads to the file as it was when it was opened."""
        try:
            now = _state(os.stat(self.path))
        except OSError as error:
            raise ModelFileError(
                f"{self.path} went away while it was read ({error.strerror}); load the model again"
            ) from error
        if now == self._state:
            return
        if now[:2] != self._state[:2]:
            change = "was replaced"
        elif now[-1] != self.size:
            change = f"went from {self.size} to {now[-1]} bytes"
        else:
            change = "was written to"
        raise ModelFileError(f"{self.path} {change} while it was read; load the model again")

    def _forget(self, offset: int, count: int) -> None:
        """Let the page cache drop so many bytes from `offset` on; 0: all to the end."""
        if self.direct or not hasattr(os, "posix_fadvise"):
            return
        self._read += count
        if self._read >= _SWEPT:
            self._read = offset = count = 0
        with contextlib.suppress(OSError):  # some file systems take no advice
            os.posix_fadvise(self._number, offset, count, os.POSIX_FADV_DONTNEED)


def _open_direct(path: Path) -> int | None:
    """The file opened with O_DIRECT; None where the system or the disk does not have that."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    number = None
    try:
        number = os.open(path, os.O_RDONLY | flag)
        os.preadv(number, [aligned(PAGE)], 0)  # some refuse only then
    except OSError as error:
        if number is not None:
            os.close(number)
        if error.errno not in _REFUSED:
            raise
        return None
    return number


def _state(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def aligned(size: int) -> mmap.mmap:
    """So many bytes that begin at a page, in large pages where the system has them; zeros until written."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


@dataclass(frozen=True)
class DiskRate:
    """How fast a file streams, and how it is read for that."""

    readers: int  # threads
    piece: int  # bytes of one read
    bytes_per_second: float
    direct: bool  # past the page cache

    def __str__(self) -> str:
        how = "past the page cache" if self.direct else "through the page cache"
        size = f"{self.piece / _MIB:g} MiB" if self.piece >= _MIB else f"{self.piece} bytes"
        readers = "1 reader" if self.readers == 1 else f"{self.readers} readers"
        return f"{gigabytes(self.bytes_per_second)}/s by {readers} of {size}, {how}"


def gigabytes(count: float) -> str:
    """Bytes on a disk in words: 1.8 GB, 94 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.{count < 1e7:d}f} MB"


def about(figure: float) -> str:
    """A figure of which two digits are known, in words: 0.057, 1.3, 27, 412."""
    return f"{figure:.2g}" if figure < 1 else f"{figure:.{figure < 10:d}f}"


# (source, memory, readers, piece, where in the file from 0 to 1, seconds) -> bytes read, seconds taken
Trial = Callable[[Readable, memoryview, int, int, float, float], tuple[int, float]]


def timed_reads(
    source: Readable, memory: memoryview, readers: int, piece: int, place: float, seconds: float
) -> tuple[int, float]:
    """Read one piece after another for so many seconds; returns the bytes and the seconds that took.

    Each reader reads one piece at least, into its share of `memory`. `place` says where they begin, from 0,
    the file's first byte, to 1.
    """
    piece = min(piece, source.size // PAGE * PAGE)
    blocks = source.size // piece
    numbers = itertools.count(int(place * blocks))
    room = len(memory) // readers // piece  # pieces
    began = time.perf_counter()

    def read(reader: int) -> int:
        done = 0
        while not done or time.perf_counter() - began < seconds:
            begin = (reader * room + done % room) * piece
            source.read_into(memory[begin : begin + piece], next(numbers) % blocks * piece)
            done += 1
        return done

    with ThreadPoolExecutor(readers) as pool:
        done = sum(pool.map(read, range(readers)))
    return done * piece, time.perf_counter() - began


def measure(
    source: Readable,
    *,
    seconds: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
    trial: Trial = timed_reads,
) -> DiskRate:
    """Find readers and pieces by which a file streams fastest, in about `seconds` altogether.

    Trials read at places that are spread over the file, so that no cache answers them. On a slow disk those
    that would take too long are left out. The file has a page at least; raises ModelFileError as a read does.
    """
    ensure(source.size >= PAGE, "a file that streams has a page at least")
    memory = memoryview(aligned(_ROOM))
    memory[::PAGE] = bytes(_ROOM // PAGE)  # pages that are there: the disk is timed, not the kernel
    began, count = clock(), len(SETTINGS) * _ROUNDS
    found = dict.fromkeys(SETTINGS, (0, 0.0))
    # Small ones first: they tell how long the larger ones would take.
    for number, setting in enumerate(sorted(SETTINGS, key=lambda one: one[0] * one[1]) * _ROUNDS):
        readers, piece = setting
        left = seconds - (clock() - began)
        known = max((size / taken for size, taken in found.values() if size), default=None)
        if known is not None and readers * min(piece, source.size) > known * left:
            continue
        size, taken = trial(source, memory, readers, piece, number / count, seconds / count)
        found[setting] = found[setting][0] + size, found[setting][1] + taken
    rates = {setting: size / taken for setting, (size, taken) in found.items() if size}
    best = max(rates.values())
    readers, piece = next(setting for setting, rate in rates.items() if rate * _WORTH >= best)
    return DiskRate(readers, piece, rates[readers, piece], source.direct)
