"""Layers that pass through a few buffers of memory while a model computes.

Reader threads fill the buffers with records of a file in the order in which layers run, over and over: behind
the last record comes the first again, so that the next pass finds its first layers read.

    places in the cycle    0  1  2  3  4  5  6 ...     record = place mod records, buffer = place mod buffers
                                 ^  |-----|            `first`: the layer that computes, or is waited for;
                                                       readers fill the buffers behind it

The computing thread changes single numbers, above all `first`: an interrupt between any two of its
instructions leaves nothing half done. Buffers belong to the readers.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, Self

from specinfer.errors import ClosedError, DamagedFileError, ensure
from specinfer.kernels.disk import PAGE, DiskRate, Readable, aligned

_PATIENCE: Final = 3.0  # seconds of waiting for one record before somebody is told, and at least
_SLOW: Final = 10  # times as long as a record usually takes
_BETWEEN: Final = 60.0  # seconds between two such warnings
_POLL: Final = 0.1  # seconds after which a wait asks whether the pass was stopped
_CLOSING: Final = 3.0  # seconds that readers have to end
_IDLE: Final = (
    10.0  # seconds after which a reader looks by itself: garbage is collected between any two lines
)
_LATE: Final = 8  # records by which the rate of late is counted
_LOG = logging.getLogger(__name__)


class StoppedError(Exception):
    """A pass was ended by whoever had begun it, before it was over."""


class StreamRecord(NamedTuple):
    """A layer's weights in a file: whole pages that begin at a page."""

    offset: int
    length: int  # bytes
    crc: int | None  # crc32 of these bytes; None: unknown
    name: str  # for messages


class LayerStream:
    """The records of a file in a few buffers, each there when its turn comes.

        with stream.passing():
            for record in range(len(records)):
                buffer = stream.take(record)  # computes on stream.buffers[buffer] until the next take

    Readers begin at once and end with `close`, or when the stream is garbage; it is a context manager that
    closes it. A child by fork has no readers: there a take raises ClosedError.
    """

    def __init__(
        self, source: Readable, records: Sequence[StreamRecord], *, buffers: int, disk: DiskRate
    ) -> None:
        """Stream `records` in this order, as `disk` says, through so many buffers (2, or 1 more to spare).

        Each buffer has room for the longest record.
        """
        ensure(len(records) > 0 and buffers > 0, "a stream has records and buffers")
        pages = all(record.offset % PAGE == record.length % PAGE == 0 < record.length for record in records)
        ensure(pages, "records are whole pages")
        longest = max(record.length for record in records)
        memories = [aligned(longest) for _ in range(buffers)]
        if hasattr(mmap, "MADV_DONTFORK"):
            for memory in memories:  # a child would share what readers write to at that moment
                memory.madvise(mmap.MADV_DONTFORK)
        self.buffers = [memoryview(memory) for memory in memories]  # they stay where they are
        self.passes = 0  # begun
        self.waited = 0.0  # seconds that `take` waited for readers
        self._waits_until = 0.0  # when the pass that runs will have what it waits for, by the disk's rate
        self._records = records
        self._disk = disk
        self._shelf = _Shelf(source, records, self.buffers, disk.piece)
        self._turn = threading.RLock()  # of a thread that times passes, for all of them
        self._stopped: Callable[[], bool] | None = None  # of the pass that runs
        self._is_still = False  # nobody waits for records
        self._taken = -1  # the place that was taken last
        self._unchecked = {number for number, record in enumerate(records) if record.crc is not None}
        self._quiet_until = 0.0
        self._end = weakref.finalize(self, self._shelf.close)
        self._end.atexit = False  # readers are daemons, and none ends amid other exits
        self._threads = [
            threading.Thread(target=self._shelf.read, name=f"specinfer-reader-{number}", daemon=True)
            for number in range(disk.readers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # no more threads in this process
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def read_bytes(self) -> int:
        """Bytes that were read so far."""
        return self._shelf.read_bytes

    def rate(self) -> float:
        """Bytes per second of late, while somebody read; the measured rate before the first record."""
        return self._shelf.rate() or self._disk.bytes_per_second

    def rest(self) -> float:
        """Seconds that the pass will go on waiting for readers, as far as is known; 0 where it computes."""
        return max(0.0, self._waits_until - time.monotonic())

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """A pass, in which the caller takes records; one at a time, others wait for their turn.

        The buffer taken last is handed back at its end. What readers met before it began, when nobody
        waited, is tried once more. A pass that has `stopped`, as it is asked before each
        record and ten times a second, ends with StoppedError.
        """
        self._shelf.check_open()  # before the lock, which a child by fork may have inherited locked
        if stopped is None:
            turn: AbstractContextManager[object] = self._turn
        else:
            turn = self._turn_unless(stopped)
        with turn:
            self.passes += 1
            self._stopped = stopped
            try:
                self._shelf.forget()
                yield self
            finally:
                self._stopped = None
                self._shelf.keep_from(max(self._shelf.first, self._taken + 1))

    @contextmanager
    def _turn_unless(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """The turn, for which a pass that is stopped does not wait."""
        while not self._turn.acquire(timeout=_POLL):
            if stopped():
                raise StoppedError("the pass was stopped")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def still(self) -> Iterator[None]:
        """A block in which every record is taken to be there, whatever is in its buffer: to time a pass."""
        with self._turn:
            self._is_still = True
            try:
                yield
            finally:
                self._is_still = False

    def take(self, record: int) -> int:
        """Wait for a record and return the buffer that holds it until the next take.

        The buffer taken before goes back to the readers. A record that is not the next one in the cycle is
        reached by giving up those before it; the one that is held is there at once. Interrupts end the wait.

        Raises whatever a reader has raised since, once: the next take begins anew there. Raises
        DamagedFileError for a record that is damaged when it is read for the first time, ClosedError when
        the stream was closed, StoppedError when the pass was.
        """
        if self._is_still:
            return record % len(self.buffers)
        shelf = self._shelf
        shelf.check_open()
        self._check_wanted()
        shelf.raise_or_forget()
        place = shelf.first + (record - shelf.first) % len(self._records)
        shelf.keep_from(place)
        if not shelf.has(place):
            self._wait(place)
        self._check(record, place)
        self._taken = place
        return place % len(self.buffers)

    def close(self) -> None:
        """End the readers; the pieces they are at are finished first, for a few seconds at most."""
        self._end()
        until = time.monotonic() + _CLOSING
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _LOG.warning(
                "the disk of %s does not answer; its readers are left behind", self._shelf.source.path
            )

    def _wait(self, place: int) -> None:
        """Wait until a record is there, for as long as that takes; say so when it takes long."""
        name, length = (record := self._records[place % len(self._records)]).name, record.length
        began = time.monotonic()
        due = max(began + max(_PATIENCE, _SLOW * length / self.rate()), self._quiet_until)
        self._waits_until = began + (length - self._shelf.arrived(place)) / self.rate()
        try:
            while not self._shelf.has(place, ring=True):
                with contextlib.suppress(Empty):
                    # Not a Condition: an interrupt can leave that half done.
                    self._shelf.bell.get(timeout=max(0.0, min(_POLL, due - time.monotonic())))
                self._check_wanted()
                if (now := time.monotonic()) >= due:
                    _LOG.warning(
                        "waiting for the disk: %.0f of %.0f MB of %s of %s after %.1f s",
                        *(self._shelf.arrived(place) / 1e6, length / 1e6, name),
                        *(self._shelf.source.path, now - began),
                    )
                    due = self._quiet_until = now + _BETWEEN
        finally:
            self._waits_until = 0.0
            self.waited += time.monotonic() - began

    def _check_wanted(self) -> None:
        if self._stopped is not None and self._stopped():
            raise StoppedError("the pass was stopped")

    def _check(self, record: int, place: int) -> None:
        if record not in self._unchecked:
            return
        # By this thread, which waits anyway: meanwhile the readers are at the next record.
        kept = self._records[record]
        if zlib.crc32(self.buffers[place % len(self.buffers)][: kept.length]) != kept.crc:
            self._shelf.give_up(place)
            raise DamagedFileError(
                f"{self._shelf.source.path}: {kept.name} has a wrong checksum; load the model again"
            )
        self._unchecked.discard(record)


@dataclass(slots=True)
class _Buffer:
    """Memory for a record, and how much of it is there."""

    memory: memoryview
    place: int = -1  # in the cycle, of the record that is here or on its way; -1: none
    begun: int = 0  # bytes that were given to readers
    arrived: int = 0  # bytes that were read
    whole: bool = False
    reading: int = 0  # pieces on their way, perhaps of a record that was given up


class _Piece(NamedTuple):
    buffer: _Buffer
    memory: memoryview
    offset: int
    last: int  # bytes of its record


class _Shelf:
    """The buffers, and all that readers share with the thread that computes; it may outlive the stream.

    One reader after another is given the next piece of the first record that lacks one. After a fault they
    pause until the computing thread, which was told, wants to go on.
    """

    def __init__(
        self, source: Readable, records: Sequence[StreamRecord], memories: Sequence[memoryview], piece: int
    ) -> None:
        self.source = source
        self.first = 0  # the place in the cycle that computes or is waited for; earlier ones are given up
        self.bell: SimpleQueue[None] = SimpleQueue()  # rings when something happened, if somebody wants that
        self.read_bytes = 0
        self._records = records
        self._piece = piece
        self._buffers = [_Buffer(memory) for memory in memories]
        self._wanted = False
        self._error: BaseException | None = None
        self._told = False  # an error was raised, and readers wait until somebody wants to go on
        self._closed = False
        self._process = os.getpid()
        # Reentrant: a thread that holds it may collect the stream as garbage, which closes this. Taken by
        # itself: an interrupt at the wrong moment would make `with` of a Condition keep the lock.
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._reading = 0  # pieces on their way
        self._reading_since = 0.0
        self._busy = 0.0  # seconds in which some piece was on its way
        self._history = deque([(0.0, 0)], maxlen=_LATE + 1)  # busy seconds and bytes at the end of records

    # What the computing thread calls.

    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a child by fork, without a lock."""
        if os.getpid() != self._process:
            raise ClosedError("a child by fork has no readers of weights; load the model in the child")
        if self._closed:
            raise ClosedError("the model was closed, and its weights are no longer read")

    def raise_or_forget(self) -> None:
        """Raise the readers' error; once it was raised, let them begin anew."""
        with self._lock:
            self._raise_error()
            self.forget()

    def forget(self) -> None:
        """Let readers that have met an error begin anew."""
        with self._lock:
            if self._error is not None or self._told:
                self._error, self._told = None, False
                self._news.notify_all()

    def _raise_error(self) -> None:
        """Raise the readers' error, once: what was raised leads to whoever heard it, the stream itself."""
        if (error := self._error) is not None:
            self._error, self._told = None, True
            try:
                raise error
            finally:
                del error

    def keep_from(self, place: int) -> None:
        """Give up all records before a place; the readers get their buffers."""
        with self._lock:
            self.first = place
            self._news.notify_all()

    def has(self, place: int, *, ring: bool = False) -> bool:
        """Whether a record is there; if not, and `ring`, the bell rings when that may have changed.

        Raises the readers' error, or ClosedError.
        """
        with self._lock:
            if self._closed:
                self.check_open()
            self._raise_error()
            buffer = self._buffer(place)
            found = buffer.place == place and buffer.whole
            self._wanted = ring and not found
            return found

    def arrived(self, place: int) -> int:
        """How many bytes of a record are there."""
        buffer = self._buffer(place)
        return buffer.arrived if buffer.place == place else 0

    def give_up(self, place: int) -> None:
        """Have a record read again."""
        with self._lock:
            self._buffer(place).place = -1
            self._news.notify_all()

    def rate(self) -> float:
        """Bytes per second of late; 0 before the first record."""
        (since, before), (now, bytes_) = self._history[0], self._history[-1]
        return (bytes_ - before) / (now - since) if now > since else 0.0

    def close(self) -> None:
        """Let readers end behind their piece; any thread may call it, the garbage collector too."""
        if os.getpid() != self._process:
            return  # the lock may have been held when this child was forked
        with self._lock:
            self._closed = True
            self._news.notify_all()
            self._ring()

    # What readers call.

    def read(self) -> None:
        """Read until `close`: the work of one reader."""
        while (piece := self._begin()) is not None:
            try:
                self.source.read_into(piece.memory, piece.offset)
                if self._arrive(piece):
                    self.source.check()
                    self._finish(piece)
            except BaseException as error:  # raised where it matters, by the thread that computes
                self._fail(piece, error)
            del piece  # its memory lives as long as somebody needs it

    def _begin(self) -> _Piece | None:
        """The next piece to be read, as soon as there is one; None: the stream was closed."""
        with self._lock:
            while not self._closed:
                if self._error is None and not self._told and (piece := self._next()) is not None:
                    if not self._reading:
                        self._reading_since = time.monotonic()
                    self._reading += 1
                    piece.buffer.reading += 1
                    return piece
                self._news.wait(_IDLE)
            return None

    def _next(self) -> _Piece | None:
        for place in range(self.first, self.first + len(self._buffers)):
            buffer = self._buffer(place)
            record = self._records[place % len(self._records)]
            if buffer.place != place:
                if buffer.reading:
                    continue  # the rest of a record that was given up is still on its way
                buffer.place, buffer.begun, buffer.arrived, buffer.whole = place, 0, 0, False
            if buffer.begun < record.length:
                begin, buffer.begun = buffer.begun, min(buffer.begun + self._piece, record.length)
                memory = buffer.memory[begin : buffer.begun]
                return _Piece(buffer, memory, record.offset + begin, record.length)
        return None

    def _arrive(self, piece: _Piece) -> bool:
        """Count a piece; returns whether its record is complete, and then leaves it to be finished."""
        with self._lock:
            self.read_bytes += len(piece.memory)
            piece.buffer.arrived += len(piece.memory)
            if piece.buffer.arrived == piece.last:
                return True
            self._leave(piece)
            return False

    def _finish(self, piece: _Piece) -> None:
        with self._lock:
            piece.buffer.whole = True
            busy = self._busy + time.monotonic() - self._reading_since
            self._history.append((busy, self.read_bytes))
            self._leave(piece)
            self._ring()

    def _fail(self, piece: _Piece, error: BaseException) -> None:
        with self._lock:
            if not self._told:
                self._error = self._error or error
            piece.buffer.place = -1
            self._leave(piece)
            self._ring()

    def _leave(self, piece: _Piece) -> None:
        piece.buffer.reading -= 1
        self._reading -= 1
        if not self._reading:
            self._busy += time.monotonic() - self._reading_since
        if not piece.buffer.reading and piece.buffer.place not in range(
            self.first, self.first + len(self._buffers)
        ):
            self._news.notify_all()  # others wait for this buffer

    def _ring(self) -> None:
        if self._wanted:
            self._wanted = False
            self.bell.put(None)

    def _buffer(self, place: int) -> _Buffer:
        return self._buffers[place % len(self._buffers)]
