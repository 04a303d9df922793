"""LayerStream: streams layers through a few buffers while a model computes.

Reader threads fill the buffers with records of a file in the order in which layers run, cyclically: the first
record follows the last, so that the next pass finds its first layers in memory.

    places in the cycle    0  1  2  3  4  5  6 ...     record = place mod records, buffer = place mod buffers
                                 ^  |-----|            `first`: the layer that computes, or is waited for;
                                                       readers fill the buffers after it

Some records may come to be in other memory (`pin`); the cycle then skips them.

The computing thread changes only single numbers, above all `first`, so an interrupt between any two of its
instructions leaves a consistent state. Buffers belong to the readers.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Self

from specinfer.errors import DamagedFileError, ensure
from specinfer.kernels.disk import PAGE, DiskRate, StreamSource, aligned
from specinfer.models.stream_buffers import StreamBuffers, StreamRecord

_WARN_AFTER: Final = 3.0  # minimum seconds of waiting for a record before a warning
_SLOW: Final = 10  # multiple of a record's usual time before a warning
_WARN_INTERVAL: Final = 60.0  # seconds between such warnings
_POLL: Final = 0.1  # seconds between checks whether the pass was stopped
_CLOSING: Final = 3.0  # seconds for readers to end
_LOG = logging.getLogger(__name__)


class StoppedError(Exception):
    """A pass was stopped by its caller before its end."""


class WeightStream(ABC):
    """Reads weights from a file while passes run, one pass at a time."""

    def __init__(self, path: Path, disk: DiskRate) -> None:
        self.passes = 0  # number of passes started
        self.waited = 0.0  # seconds that passes waited for readers
        self._path = path  # for messages
        self._disk = disk
        self._turn = threading.RLock()  # held by a thread during a pass, or across timed passes
        self._stopped: Callable[[], bool] | None = None  # for the current pass
        self._is_still = False  # no thread waits for records
        self._quiet_until = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Total bytes read."""

    @abstractmethod
    def rate(self) -> float:
        """Recent bytes per second while reading; the measured rate before the first record."""

    @abstractmethod
    def close(self) -> None:
        """End the readers after their current pieces; waits a few seconds at most."""

    @abstractmethod
    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a child by fork, without a lock."""

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """A pass, in which the caller takes records; other threads wait for their turn.

        A reader error from before the pass, while no thread waited, is retried once. `stopped` is polled
        before each record and ten times per second; if it returns True, the pass ends with StoppedError.
        """
        self.check_open()  # before the lock, which a forked child may have inherited locked
        if stopped is None:
            turn: AbstractContextManager[object] = self._turn
        else:
            turn = self._turn_unless(stopped)
        with turn:
            self.passes += 1
            self._stopped = stopped
            try:
                yield self
            finally:
                self._stopped = None

    @contextmanager
    def _turn_unless(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """The turn; a stopped pass does not wait for it."""
        while not self._turn.acquire(timeout=_POLL):
            if stopped():
                raise StoppedError("the pass was stopped")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def still(self) -> Iterator[None]:
        """In this block every record counts as loaded, to time a pass without the disk."""
        with self._turn:
            self._is_still = True
            try:
                yield
            finally:
                self._is_still = False

    def _check_stopped(self) -> None:
        if self._stopped is not None and self._stopped():
            raise StoppedError("the pass was stopped")

    def _wait(
        self,
        record: StreamRecord,
        bell: SimpleQueue[None],
        arrived: Callable[[], int],
        *,
        there: Callable[[], bool],
    ) -> None:
        """Wait until a record is loaded, without limit; log a warning if it takes long.

        `bell` gets an item when `there` may have become true; `arrived` returns the bytes read so far.
        """
        began = time.monotonic()
        due = max(began + max(_WARN_AFTER, _SLOW * record.length / self.rate()), self._quiet_until)
        try:
            while not there():
                with contextlib.suppress(Empty):
                    # Not a Condition, which an interrupt can leave inconsistent.
                    bell.get(timeout=max(0.0, min(_POLL, due - time.monotonic())))
                self._check_stopped()
                if (now := time.monotonic()) >= due:
                    _LOG.warning(
                        "waiting for the disk: %.0f of %.0f MB of %s of %s after %.1f s",
                        *(arrived() / 1e6, record.length / 1e6, record.name, self._path, now - began),
                    )
                    due = self._quiet_until = now + _WARN_INTERVAL
        finally:
            self.waited += time.monotonic() - began

    def _end_threads(self, threads: Sequence[threading.Thread]) -> None:
        """Wait a few seconds for readers that are ending."""
        until = time.monotonic() + _CLOSING
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            _LOG.warning("the disk of %s does not respond; its readers are abandoned", self._path)


def start_readers(work: Callable[[], None], count: int) -> list[threading.Thread]:
    """`count` started threads that run `work`; raises RuntimeError if the process has too many threads."""
    threads = [
        threading.Thread(target=work, name=f"specinfer-reader-{number}", daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads


def kept_from_children(memory: mmap.mmap) -> mmap.mmap:
    """The same memory, which a forked child does not inherit, because readers write to it."""
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


class LayerStream(WeightStream):
    """The records of a file in a few buffers, each loaded when it is needed.

        with stream.passing():
            for record in range(len(records)):
                buffer = stream.take(record)  # compute on stream.buffers[buffer] until the next take

    Readers start at once and end with `close`, or when the stream is garbage collected; as a context manager
    it closes itself. A forked child has no readers, and a take there raises ClosedError.
    """

    def __init__(
        self, source: StreamSource, records: Sequence[StreamRecord], *, buffers: int, disk: DiskRate
    ) -> None:
        """Stream `records` in order, with the settings in `disk`, through `buffers` buffers (2, or a spare).

        Each buffer has room for the longest record.
        """
        ensure(len(records) > 0 and buffers > 0, "a stream needs records and buffers")
        pages = all(record.offset % PAGE == record.length % PAGE == 0 < record.length for record in records)
        ensure(pages, "records are whole pages")
        super().__init__(source.path, disk)
        longest = max(record.length for record in records)
        memories = [kept_from_children(aligned(longest)) for _ in range(buffers)]
        self.buffers = [memoryview(memory) for memory in memories]  # their addresses never change
        self._records = records
        self._pinned: frozenset[int] = frozenset()  # records in other memory
        self._cycle = list(range(len(records)))  # the others
        self._shared = StreamBuffers(source, records, self.buffers, disk.piece)
        self._taken = -1  # the last place taken
        self._unchecked = {number for number, record in enumerate(records) if record.crc is not None}
        self._end = weakref.finalize(self, self._shared.close)
        self._end.atexit = False  # readers are daemons, and must not end during interpreter exit
        try:
            self._threads = start_readers(self._shared.read, disk.readers)
        except RuntimeError:  # the process has too many threads
            self._end()
            raise

    @property
    def read_bytes(self) -> int:
        """Implements WeightStream."""
        return self._shared.read_bytes

    def rate(self) -> float:
        """Implements WeightStream."""
        return self._shared.rate() or self._disk.bytes_per_second

    def check_open(self) -> None:
        """Implements WeightStream."""
        self._shared.check_open()

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """Implements WeightStream.passing; at its end the last buffer is returned to the readers."""
        with super().passing(stopped):
            try:
                self._shared.retry()
                yield self
            finally:
                self._shared.keep_from(max(self._shared.first, self._taken + 1))

    def pin(self, records: Collection[int]) -> None:
        """Stream only the other records from now on; these are in other memory. Waits for a pass to end."""
        with self._turn:
            self._pinned = frozenset(records)
            self._cycle = [number for number in range(len(self._records)) if number not in self._pinned]
            self._shared.restart([self._records[number] for number in self._cycle])

    def take(self, record: int) -> int:
        """Wait for a record and return the index of its buffer, valid until the next take.

        For a pinned record the index is the number of buffers. The previous buffer returns to the readers.
        Taking a record other than the next one in the cycle drops those before it; the current one is
        available at once. Interrupts end the wait.

        Raises an error of a reader once; the next take retries. Raises DamagedFileError for a record with a
        wrong checksum when it is read for the first time, ClosedError after `close`, StoppedError if the pass
        was stopped.
        """
        if self._is_still:
            return record % len(self.buffers)
        shared = self._shared
        shared.check_open()
        self._check_stopped()
        if record in self._pinned:
            return len(self.buffers)
        shared.raise_or_retry()
        place = shared.first + (bisect_left(self._cycle, record) - shared.first) % len(self._cycle)
        shared.keep_from(place)
        if not shared.has(place):
            there, arrived = partial(shared.has, place, ring=True), partial(shared.arrived, place)
            self._wait(self._records[record], shared.bell, arrived, there=there)
        self._check(record, place)
        self._taken = place
        return place % len(self.buffers)

    def close(self) -> None:
        """Implements WeightStream."""
        self._end()
        self._end_threads(self._threads)

    def _check(self, record: int, place: int) -> None:
        if record not in self._unchecked:
            return
        # In this thread, which is idle: the readers continue with the next record.
        kept = self._records[record]
        if zlib.crc32(self.buffers[place % len(self.buffers)][: kept.length]) != kept.crc:
            self._shared.give_up(place)
            raise DamagedFileError(
                f"{self._shared.source.path}: {kept.name} has a wrong checksum; load the model again"
            )
        self._unchecked.discard(record)
