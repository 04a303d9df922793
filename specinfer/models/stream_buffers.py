"""The buffers of a stream, which reader threads fill in the order in which records are needed."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, NamedTuple

from specinfer.errors import ClosedError
from specinfer.kernels.disk import Readable

# Seconds after which a reader looks by itself: garbage is collected between any two lines.
_IDLE: Final = 10.0
_LATE: Final = 8  # records by which the rate of late is counted


class StreamRecord(NamedTuple):
    """A layer's weights in a file: whole pages that begin at a page."""

    offset: int
    length: int  # bytes
    crc: int | None  # crc32 of these bytes; None: unknown
    name: str  # for messages


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


class StreamBuffers:
    """The buffers of a stream, and all that readers share with the thread that computes.

    It may outlive the stream.

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

    def begin_anew(self, records: Sequence[StreamRecord]) -> None:
        """Have these records read from now on, over and over, and give up all that was read; no pass runs."""
        with self._lock:
            self._records = records
            if records:
                self.first = -(-self.first // len(records)) * len(records)  # the next first record
            for buffer in self._buffers:
                buffer.place = -1
            self._news.notify_all()

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
        if not self._records:
            return None
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
