"""StreamBuffers: buffers of a stream, filled by reader threads in the order of use."""

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
from specinfer.kernels.disk import StreamSource

# Seconds between checks of an idle reader, since garbage collection may close the stream at any time.
_IDLE: Final = 10.0
_RATE_RECORDS: Final = 8  # records over which the recent rate is measured


class StreamRecord(NamedTuple):
    """A layer's weights in a file, in whole pages."""

    offset: int
    length: int  # bytes
    crc: int | None  # crc32 of these bytes; None: unknown
    name: str  # for messages


@dataclass(slots=True)
class _Buffer:
    """Memory for a record, and its state."""

    memory: memoryview
    place: int = -1  # place in the cycle of its record; -1: none
    begun: int = 0  # bytes assigned to readers
    arrived: int = 0  # bytes read
    whole: bool = False
    reading: int = 0  # pieces being read, possibly of a dropped record


class _Piece(NamedTuple):
    buffer: _Buffer
    memory: memoryview
    offset: int
    last: int  # bytes of its record


class StreamBuffers:
    """The buffers of a stream, and the state shared by readers and the computing thread.

    It may outlive the stream.

    Each reader in turn gets the next piece of the first incomplete record. After an error readers pause until
    the computing thread, which received the error, continues.
    """

    def __init__(
        self,
        source: StreamSource,
        records: Sequence[StreamRecord],
        memories: Sequence[memoryview],
        piece: int,
    ) -> None:
        self.source = source
        self.first = 0  # place in the cycle that computes or is waited for; earlier ones are dropped
        self.bell: SimpleQueue[None] = SimpleQueue()  # signals a change, if requested
        self.read_bytes = 0
        self._records = records
        self._piece = piece
        self._buffers = [_Buffer(memory) for memory in memories]
        self._wanted = False
        self._error: BaseException | None = None
        self._raised = False  # an error was raised; readers wait until the computing thread continues
        self._closed = False
        self._process = os.getpid()
        # Reentrant, since a thread that holds it may garbage collect the stream, which closes this object. It
        # is acquired directly: an interrupt at the wrong moment would make `with` of a Condition keep the
        # lock.
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._reading = 0  # pieces being read
        self._reading_since = 0.0
        self._busy = 0.0  # seconds in which a piece was being read
        self._history = deque([(0.0, 0)], maxlen=_RATE_RECORDS + 1)  # busy seconds and bytes after records

    # Methods for the computing thread.

    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a forked child, without using the lock."""
        if os.getpid() != self._process:
            raise ClosedError("a child by fork has no readers of weights; load the model in the child")
        if self._closed:
            raise ClosedError("the model was closed, and its weights are no longer read")

    def raise_or_retry(self) -> None:
        """Raise the readers' error; if it was raised before, let them retry."""
        with self._lock:
            self._raise_error()
            self.retry()

    def retry(self) -> None:
        """Let readers retry after an error."""
        with self._lock:
            if self._error is not None or self._raised:
                self._error, self._raised = None, False
                self._news.notify_all()

    def _raise_error(self) -> None:
        """Raise the readers' error once, and drop it, since its traceback refers to the stream."""
        if (error := self._error) is not None:
            self._error, self._raised = None, True
            try:
                raise error
            finally:
                del error

    def keep_from(self, place: int) -> None:
        """Drop all records before a place; readers get their buffers."""
        with self._lock:
            self.first = place
            self._news.notify_all()

    def has(self, place: int, *, ring: bool = False) -> bool:
        """True if a record is loaded; if not, and `ring`, the bell is rung on the next change.

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
        """The number of loaded bytes of a record."""
        buffer = self._buffer(place)
        return buffer.arrived if buffer.place == place else 0

    def restart(self, records: Sequence[StreamRecord]) -> None:
        """Read these records cyclically from now on, and drop everything loaded; no pass may be running."""
        with self._lock:
            self._records = records
            if records:
                self.first = -(-self.first // len(records)) * len(records)  # the start of the next cycle
            for buffer in self._buffers:
                buffer.place = -1
            self._news.notify_all()

    def give_up(self, place: int) -> None:
        """Read a record again."""
        with self._lock:
            self._buffer(place).place = -1
            self._news.notify_all()

    def rate(self) -> float:
        """Recent bytes per second; 0 before the first record."""
        (since, before), (now, bytes_) = self._history[0], self._history[-1]
        return (bytes_ - before) / (now - since) if now > since else 0.0

    def close(self) -> None:
        """Let readers end after their pieces; callable by any thread, including the garbage collector."""
        if os.getpid() != self._process:
            return  # the lock may have been held when this child was forked
        with self._lock:
            self._closed = True
            self._news.notify_all()
            self._ring()

    # Methods for readers.

    def read(self) -> None:
        """The loop of a reader, until `close`."""
        while (piece := self._begin()) is not None:
            try:
                self.source.read_into(piece.memory, piece.offset)
                if self._arrive(piece):
                    self.source.check()
                    self._finish(piece)
            except BaseException as error:  # raised later by the computing thread
                self._fail(piece, error)
            del piece  # releases its memory

    def _begin(self) -> _Piece | None:
        """Wait for the next piece to read; None if the stream was closed."""
        with self._lock:
            while not self._closed:
                if self._error is None and not self._raised and (piece := self._next()) is not None:
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
                    continue  # the rest of a dropped record is still being read
                buffer.place, buffer.begun, buffer.arrived, buffer.whole = place, 0, 0, False
            if buffer.begun < record.length:
                begin, buffer.begun = buffer.begun, min(buffer.begun + self._piece, record.length)
                memory = buffer.memory[begin : buffer.begun]
                return _Piece(buffer, memory, record.offset + begin, record.length)
        return None

    def _arrive(self, piece: _Piece) -> bool:
        """Count a piece; return True if its record is complete, which the caller must then finish."""
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
            if not self._raised:
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
