"""Streams of weights: records of a file that are read into a few slots of memory while a model computes.

StreamReaders are the threads that read, WeightStream takes records from them, and LayerStream streams layers:
readers fill its buffers in the order in which layers run, cyclically. The first record follows the last, so
that the next pass finds its first layers in memory.

    places in the cycle    0  1  2  3  4  5  6 ...     record = place mod records, buffer = place mod buffers
                                 ^  |-----|            `first`: the layer that computes, or is waited for;
                                                       readers fill the buffers after it

Some records may come to be in other memory (`pin`); the cycle then skips them.
"""

import logging
import mmap
import os
import threading
import time
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, NamedTuple, Self

from specinfer.errors import ClosedError, DamagedFileError, ensure
from specinfer.kernels.disk import PAGE, DiskRate, StreamSource, aligned

_WARN_AFTER: Final = 3.0  # minimum seconds of waiting for a record before a warning
_SLOW: Final = 10  # multiple of a record's usual time before a warning
_WARN_INTERVAL: Final = 60.0  # seconds between such warnings
_POLL: Final = 0.1  # seconds between checks whether the pass was stopped
_CLOSING: Final = 3.0  # seconds for readers to end
_MIN_PIECE: Final = 64 * PAGE  # bytes: smaller ones cost more calls than they save
_LOG = logging.getLogger(__name__)


class StoppedError(Exception):
    """A pass was stopped by its caller before its end."""


class StreamRecord(NamedTuple):
    """Weights in a file that are read together, in whole pages."""

    offset: int
    length: int  # bytes
    crc: int | None  # crc32 of these bytes; None: unknown
    name: str  # for messages


@dataclass(slots=True, eq=False)
class _Read:
    """A record on its way into a slot."""

    memory: memoryview
    offset: int
    left: int  # bytes that have not arrived
    failed: bool = False
    error: BaseException | None = None  # not raised yet


class _Piece(NamedTuple):
    slot: int
    read: _Read
    memory: memoryview
    offset: int


class StreamReaders:
    """State shared by reader threads and the thread that computes; it may outlive the stream.

    Readers read pieces of records in the order in which these were begun. A thread that begins a read may not
    be interrupted, as the engine's never is: pieces that were not queued would be waited for.
    """

    def __init__(self, source: StreamSource, piece: int, readers: int) -> None:
        self.read_bytes = 0
        self._source = source
        self._piece, self._readers = piece, readers
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        # Its lock is reentrant: a thread that holds it may collect the stream as garbage, which closes this.
        self._news = threading.Condition()
        self._wanted: dict[int, _Read] = {}  # the last read begun, by slot
        self._running: dict[int, _Read] = {}  # the last read whose pieces were queued, by slot
        self._closed = False
        self._process = os.getpid()

    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a child by fork, without a lock."""
        if os.getpid() != self._process:
            raise ClosedError("a child by fork has no readers of weights; load the model in the child")
        if self._closed:
            raise ClosedError("the model was closed, and its weights are no longer read")

    def begin(self, slot: int, memory: memoryview, offset: int) -> None:
        """Read `memory` from `offset` on, once no piece of the slot's previous record is being read."""
        with self._news:
            self._wanted[slot] = _Read(memory, offset, len(memory))
            if slot not in self._running or not self._running[slot].left:
                self._queue(slot)

    def _queue(self, slot: int) -> None:
        self._running[slot] = read = self._wanted[slot]
        size = max(_MIN_PIECE, -(-read.left // self._readers // PAGE) * PAGE)
        size = min(size, self._piece)
        for begin in range(0, len(read.memory), size):
            self._pieces.put(_Piece(slot, read, read.memory[begin : begin + size], read.offset + begin))

    def left(self, slot: int) -> int:
        """Bytes of a slot's record that have not arrived."""
        return self._wanted[slot].left

    def failed(self, slot: int) -> bool:
        """True if a slot's record could not be read."""
        return self._wanted[slot].failed and not self.left(slot)

    def arrived(self, slot: int, timeout: float = 0.0) -> bool:
        """Return True once a slot has its record; waits `timeout` seconds at most.

        Raises an error of a reader once, after all pieces were read, and ClosedError.
        """
        with self._news:
            read = self._wanted[slot]
            if timeout and read.left and not self._closed:
                self._news.wait(timeout)
            self.check_open()
            if read.left:
                return False
            error, read.error = read.error, None  # its traceback will refer to the stream
            try:
                if error is not None:
                    raise error
            finally:
                del error
            return True

    def close(self) -> None:
        """Stop readers after their current pieces; callable by any thread, and as garbage is collected."""
        if os.getpid() != self._process:
            return  # the lock may have been held when this child was forked
        with self._news:
            self._closed = True
            self._news.notify_all()
        for _ in range(self._readers):
            self._pieces.put(None)

    def run(self) -> None:
        """Read until `close`: the work of one reader."""
        while (piece := self._pieces.get()) is not None:
            error: BaseException | None = None
            # A piece of a record that was dropped is not read.
            is_read = not self._closed and self._wanted[piece.slot] is piece.read
            if is_read:
                try:
                    self._source.read_into(piece.memory, piece.offset)
                    self._source.check()
                except BaseException as met:  # raised where it matters, by the thread that computes
                    error = met
            self._arrive(piece, error, is_read=is_read)
            del piece, error  # so that this thread does not keep the memory alive

    def _arrive(self, piece: _Piece, error: BaseException | None, *, is_read: bool) -> None:
        slot, read = piece.slot, piece.read
        with self._news:
            read.left -= len(piece.memory)
            if error is not None:
                read.failed, read.error = True, error
            elif is_read:
                self.read_bytes += len(piece.memory)
            if not read.left:
                if self._wanted[slot] is not read:
                    self._queue(slot)
                self._news.notify_all()


class WeightStream:
    """Reads records of a file into slots while passes run, one pass at a time.

    Readers start at once and end with `close`, or when the stream is garbage collected; as a context manager
    it closes itself. A forked child has no readers, and a take there raises ClosedError.
    """

    def __init__(
        self, source: StreamSource, records: Sequence[StreamRecord], *, slots: int, disk: DiskRate
    ) -> None:
        """Each of the `slots` has room for the longest record; `disk` has the settings of readers."""
        ensure(len(records) > 0 and slots > 0, "a stream needs records and memory")
        pages = all(record.offset % PAGE == record.length % PAGE == 0 < record.length for record in records)
        ensure(pages, "records are whole pages")
        self.passes = 0  # number of passes started
        self.waited = 0.0  # seconds that passes waited for readers
        self._path = source.path  # for messages
        self._disk = disk
        self._records = records
        longest = max(record.length for record in records)
        memory = memoryview(kept_from_children(aligned(longest * slots)))
        # Memory of the slots, whose addresses never change.
        self.buffers = [memory[slot * longest : (slot + 1) * longest] for slot in range(slots)]
        self._unchecked = {number for number, record in enumerate(records) if record.crc is not None}
        self._turn = threading.RLock()  # held by a thread during a pass, or across timed passes
        self._stopped: Callable[[], bool] | None = None  # for the current pass
        self._is_still = False  # no thread waits for records
        self._quiet_until = 0.0
        self._readers = StreamReaders(source, disk.piece, disk.readers)
        self._end = weakref.finalize(self, self._readers.close)
        self._end.atexit = False  # readers are daemons, and must not end during interpreter exit
        self._threads = [
            threading.Thread(target=self._readers.run, name=f"specinfer-reader-{number}", daemon=True)
            for number in range(disk.readers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def read_bytes(self) -> int:
        """Total bytes read."""
        return self._readers.read_bytes

    def close(self) -> None:
        """End the readers after their current pieces; waits a few seconds at most."""
        self._end()
        until = time.monotonic() + _CLOSING
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _LOG.warning("the disk of %s does not respond; its readers are abandoned", self._path)

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """A pass, in which the caller takes records; other threads wait for their turn.

        `stopped` is polled before each record and ten times per second; if it returns True, the pass ends
        with StoppedError, or does not begin.
        """
        self._readers.check_open()  # before the lock, which a forked child may have inherited locked
        while not self._turn.acquire(timeout=_POLL):
            if stopped is not None and stopped():
                raise StoppedError("the pass was stopped")
        self.passes += 1
        self._stopped = stopped
        try:
            yield self
        finally:
            self._stopped = None
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

    def _check_running(self) -> None:
        """Raise ClosedError after `close`, StoppedError if the pass was stopped."""
        self._readers.check_open()
        if self._stopped is not None and self._stopped():
            raise StoppedError("the pass was stopped")

    def _begin(self, number: int, slot: int) -> None:
        """Start reading a record into a slot."""
        record = self._records[number]
        self._readers.begin(slot, self.buffers[slot][: record.length], record.offset)

    def _loaded(self, number: int, slot: int) -> memoryview:
        """Wait until a slot has this record, which was begun, and return its bytes.

        A read that failed before is repeated. Raises an error of a reader, DamagedFileError if the first read
        of the record finds it damaged, ClosedError, and StoppedError if the pass was stopped.
        """
        if self._readers.failed(slot):
            self._begin(number, slot)
        if not self._readers.arrived(slot):
            self._wait(number, slot)
        record = self._records[number]
        memory = self.buffers[slot][: record.length]
        # In this thread, which is idle: the readers continue with the next record.
        if number in self._unchecked:
            if zlib.crc32(memory) != record.crc:
                self._begin(number, slot)
                raise DamagedFileError(
                    f"{self._path}: {record.name} has a wrong checksum; load the model again"
                )
            self._unchecked.discard(number)
        return memory

    def _wait(self, number: int, slot: int) -> None:
        """Wait until a record is loaded, without limit; log a warning if it takes long."""
        began, record = time.monotonic(), self._records[number]
        usual = record.length / self._disk.bytes_per_second
        due = max(began + max(_WARN_AFTER, _SLOW * usual), self._quiet_until)
        try:
            self._check_running()
            while not self._readers.arrived(slot, max(0.001, min(_POLL, due - time.monotonic()))):
                self._check_running()
                if (now := time.monotonic()) >= due:
                    there = record.length - self._readers.left(slot)
                    _LOG.warning(
                        "waiting for the disk: %.0f of %.0f MB of %s of %s after %.1f s",
                        *(there / 1e6, record.length / 1e6, record.name, self._path, now - began),
                    )
                    due = self._quiet_until = now + _WARN_INTERVAL
        finally:
            self.waited += time.monotonic() - began


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
    """

    def __init__(
        self, source: StreamSource, records: Sequence[StreamRecord], *, buffers: int, disk: DiskRate
    ) -> None:
        """Stream `records` in order through `buffers` buffers (2, or a spare); see WeightStream."""
        super().__init__(source, records, slots=buffers, disk=disk)
        self.pin(())

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """Implements WeightStream.passing; at its end the last buffer is returned to the readers."""
        with super().passing(stopped):
            try:
                yield self
            finally:
                self._keep_from(max(self._first, self._taken + 1))

    def pin(self, records: Collection[int]) -> None:
        """Stream only the other records from now on; these are in other memory. Waits for a pass to end."""
        with self._turn:
            self._pinned = frozenset(records)
            self._cycle = [number for number in range(len(self._records)) if number not in self._pinned]
            self._begun = 0  # the first place whose record was not begun
            self._taken = -1  # the last place taken
            self._keep_from(0)

    def take(self, record: int) -> int:
        """Wait for a record and return the index of its buffer, valid until the next take.

        For a pinned record the index is the number of buffers. The previous buffer returns to the readers.
        Taking a record other than the next one in the cycle drops those before it; the current one is
        available at once. Raises as `WeightStream._loaded`.
        """
        if self._is_still:
            return record % len(self.buffers)
        self._check_running()
        if record in self._pinned:
            return len(self.buffers)
        place = self._first + (bisect_left(self._cycle, record) - self._first) % len(self._cycle)
        self._keep_from(place)
        buffer = place % len(self.buffers)
        self._loaded(record, buffer)
        self._taken = place
        return buffer

    def _keep_from(self, place: int) -> None:
        """Drop all records before a place, and begin to read later ones into their buffers."""
        self._first, end = place, place + len(self.buffers)
        if self._cycle:
            for later in range(max(place, self._begun), end):
                self._begin(self._cycle[later % len(self._cycle)], later % len(self.buffers))
        self._begun = max(self._begun, end)
