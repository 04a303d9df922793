"""Streams files from disk into page-aligned memory, and measures the speeds of disk and memory.

A file larger than memory must not pass through the page cache: the cache would compete with pinned layers,
and evicts the pages that are needed next. So a file is read with O_DIRECT if its disk allows that; otherwise
each piece is dropped from the cache after it was read.

The fastest number and size of readers differs between disks by a factor of two in both directions, so each
start runs trials for half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import statistics
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specinfer.errors import ModelFileError, ensure

if TYPE_CHECKING:
    from specinfer.kernels.library import Library

PAGE: Final = 4096  # bytes: offsets, lengths and addresses of reads are multiples of it
_MIB: Final = 1 << 20
# Bytes read between drops of the whole file from the page cache. Read-ahead for one reader may bring back
# pieces that another has dropped. Dropping the file more often halves the speed.
_DROP_INTERVAL: Final = 32 * _MIB
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)  # the file system has no O_DIRECT
# Readers and bytes of a piece, in order of preference among similar speeds. Large pieces come first: after
# each piece a reader waits up to 5 ms for the GIL while other threads run Python.
SETTINGS: Final = ((1, 16 * _MIB), (1, 4 * _MIB), (2, 4 * _MIB), (4, _MIB), (8, _MIB))
_MIN_SPEEDUP: Final = 1.05  # minimum speedup for preferring a later setting
_SECONDS: Final = 0.5  # of all trials
_ROUNDS: Final = 2  # rounds over all settings, so that a disturbance affects several
_TRIAL_BYTES: Final = 64 * _MIB  # buffer of the trials, larger than the caches, as layers are
STREAMED: Final = 1 << 29  # bytes of memory in one measurement, more than any cache holds
_USUAL: Final = 3  # measurements of memory whose median is taken
_LOG = logging.getLogger(__name__)


class StreamSource:
    """A file that is read in pieces into page-aligned memory, by any number of threads.

    It stays open while the object is referenced: a thread that is blocked in a read refers to it, so its
    descriptor cannot be reused for another file.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; raises ModelFileError on failure."""
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
        self._read = 0  # bytes since the whole file was dropped from the page cache
        self._drop_cached(0, 0)
        if not self.direct:
            _LOG.info("%s: this file system has no O_DIRECT; each piece leaves the page cache again", path)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes of the file from `offset` on.

        The address, the length and `offset` are multiples of PAGE. Raises ModelFileError if the file ends
        early or the disk fails.
        """
        ensure(offset % PAGE == 0 and len(view) % PAGE == 0, "a read begins and ends at whole pages")
        try:
            while view:
                count = os.preadv(self._number, [view], offset)
                self._drop_cached(offset, count)
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
        """Raise ModelFileError unless the path still refers to the file as it was opened."""
        try:
            now = _state(os.stat(self.path))
        except OSError as error:
            raise ModelFileError(
                f"{self.path} disappeared while it was read ({error.strerror}); load the model again"
            ) from error
        if now == self._state:
            return
        if now[:2] != self._state[:2]:
            change = "was replaced"
        elif now[-1] != self.size:
            change = f"changed from {self.size} to {now[-1]} bytes"
        else:
            change = "was written to"
        raise ModelFileError(f"{self.path} {change} while it was read; load the model again")

    def _drop_cached(self, offset: int, count: int) -> None:
        """Drop `count` bytes at `offset` from the page cache; 0: to the end."""
        if self.direct or not hasattr(os, "posix_fadvise"):
            return
        self._read += count
        if self._read >= _DROP_INTERVAL:
            self._read = offset = count = 0
        with contextlib.suppress(OSError):  # some file systems do not support it
            os.posix_fadvise(self._number, offset, count, os.POSIX_FADV_DONTNEED)


def _open_direct(path: Path) -> int | None:
    """Open the file with O_DIRECT; None if the system or the disk does not support that."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    number = None
    try:
        number = os.open(path, os.O_RDONLY | flag)
        os.preadv(number, [aligned(PAGE)], 0)  # some systems reject only the read
    except OSError as error:
        if number is not None:
            os.close(number)
        if error.errno not in _NO_DIRECT:
            raise
        return None
    return number


def _state(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def aligned(size: int) -> mmap.mmap:
    """Allocate page-aligned zeroed memory, in large pages if available."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _touched(size: int) -> mmap.mmap:
    """Aligned memory whose pages are written: others map to one zero page, which stays in the cache."""
    pages = aligned(size)
    memoryview(pages)[::PAGE] = bytes(-(-size // PAGE))
    return pages


@dataclass(frozen=True)
class DiskRate:
    """The speed of streaming a file, and the settings for it."""

    readers: int  # threads
    piece: int  # bytes per read
    bytes_per_second: float
    direct: bool  # bypassing the page cache

    def __str__(self) -> str:
        how = "past the page cache" if self.direct else "through the page cache"
        size = f"{self.piece / _MIB:g} MiB" if self.piece >= _MIB else f"{self.piece} bytes"
        readers = "1 reader" if self.readers == 1 else f"{self.readers} readers"
        return f"{gigabytes(self.bytes_per_second)}/s by {readers} of {size}, {how}"


def gigabytes(count: float) -> str:
    """Bytes on a disk as text: 1.8 GB, 94 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.{count < 1e7:d}f} MB"


def about(figure: float) -> str:
    """A figure with two significant digits as text: 0.057, 1.3, 27, 412."""
    return f"{figure:.2g}" if figure < 1 else f"{figure:.{figure < 10:d}f}"


def timed_reads(
    source: StreamSource, memory: memoryview, readers: int, piece: int, place: float, seconds: float
) -> tuple[int, float]:
    """Read consecutive pieces for `seconds`; returns the bytes read and the seconds taken.

    Each reader reads at least one piece, into its share of `memory`. `place` is the start, from 0, the file's
    first byte, to 1.
    """
    piece = min(piece, source.size // PAGE * PAGE)
    blocks = source.size // piece
    numbers = itertools.count(int(place * blocks))
    room = len(memory) // readers // piece  # in pieces
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


def measure(source: StreamSource) -> DiskRate:
    """Find the readers and piece size with which a file streams fastest, in about half a second in total.

    Trials start at different places of the file, so that no cache serves them. On a slow disk, settings that
    would take too long are skipped. The file has at least one page; raises ModelFileError as a read does.
    """
    ensure(source.size >= PAGE, "a file that streams has a page at least")
    memory = memoryview(_touched(_TRIAL_BYTES))  # so that the disk alone is timed
    began, count = time.perf_counter(), len(SETTINGS) * _ROUNDS
    found = dict.fromkeys(SETTINGS, (0, 0.0))
    # Small ones first: they predict the time of larger ones.
    for number, setting in enumerate(sorted(SETTINGS, key=lambda one: one[0] * one[1]) * _ROUNDS):
        readers, piece = setting
        left = _SECONDS - (time.perf_counter() - began)
        known = max((size / taken for size, taken in found.values() if size), default=None)
        if known is not None and readers * min(piece, source.size) > known * left:
            continue
        size, taken = timed_reads(source, memory, readers, piece, number / count, _SECONDS / count)
        found[setting] = found[setting][0] + size, found[setting][1] + taken
    rates = {setting: size / taken for setting, (size, taken) in found.items() if size}
    best = max(rates.values())
    readers, piece = next(setting for setting, rate in rates.items() if rate * _MIN_SPEEDUP >= best)
    return DiskRate(readers, piece, rates[readers, piece], source.direct)


class Bandwidth:
    """Bytes per second of streaming memory; measure it next to each timing it is compared with.

    On a shared machine it may double within a second. All measurements are in `found`.
    """

    def __init__(self, library: Library, size: int = STREAMED) -> None:
        """Measure over `size` bytes with the threads of `library`, in large pages if available."""
        self._library, self._size, self._memory = library, size, _touched(size)
        self.found: list[float] = []

    def measure(self) -> float:
        """Measure once."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.found.append(self._library.stream(address, self._size))
        return self.found[-1]

    def median(self) -> float:
        """The median of a few measurements."""
        return statistics.median(self.measure() for _ in range(_USUAL))

    def compare(self, call: Callable[[], object], size: float, repeats: int) -> tuple[float, float]:
        """Median milliseconds of a call, and its ratio to the time of streaming `size` bytes."""
        milliseconds, times = [], []
        before = self.measure()
        for _ in range(repeats):
            taken, after = seconds(call), self.measure()
            milliseconds.append(1e3 * taken)
            times.append(taken / (size / before + size / after) * 2)
            before = after
        return statistics.median(milliseconds), statistics.median(times)


def seconds(call: Callable[[], object]) -> float:
    """The duration of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
