"""Layers that pass through a few buffers of memory while a model computes.

Reader threads fill the buffers with records of a file in the order in which layers run, over and over: behind
the last record comes the first again, so that the next pass finds its first layers read.

    places in the cycle    0  1  2  3  4  5  6 ...     record = place mod records, buffer = place mod buffers
                                 ^  |-----|            `first`: the layer that computes, or is waited for;
                                                       readers fill the buffers behind it

Some records may come to lie elsewhere in memory for a time (`pin`); then the cycle is of the others.

The computing thread changes single numbers, above all `first`: an interrupt between any two of its
instructions leaves nothing half done. Buffers belong to the readers.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import Empty
from typing import Final, Self

from specinfer.errors import DamagedFileError, ensure
from specinfer.kernels.disk import PAGE, DiskRate, Readable, aligned
from specinfer.models.stream_buffers import StreamBuffers, StreamRecord

_PATIENCE: Final = 3.0  # seconds of waiting for one record before somebody is told, and at least
_SLOW: Final = 10  # times as long as a record usually takes
_BETWEEN: Final = 60.0  # seconds between two such warnings
_POLL: Final = 0.1  # seconds after which a wait asks whether the pass was stopped
_CLOSING: Final = 3.0  # seconds that readers have to end
_LOG = logging.getLogger(__name__)


class StoppedError(Exception):
    """A pass was ended by whoever had begun it, before it was over."""


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
        self._records = records
        self._pinned: frozenset[int] = frozenset()  # records that lie elsewhere
        self._cycle = list(range(len(records)))  # the others
        self._disk = disk
        self._shared = StreamBuffers(source, records, self.buffers, disk.piece)
        self._turn = threading.RLock()  # of a thread that times passes, for all of them
        self._stopped: Callable[[], bool] | None = None  # of the pass that runs
        self._is_still = False  # nobody waits for records
        self._taken = -1  # the place that was taken last
        self._unchecked = {number for number, record in enumerate(records) if record.crc is not None}
        self._quiet_until = 0.0
        self._end = weakref.finalize(self, self._shared.close)
        self._end.atexit = False  # readers are daemons, and none ends amid other exits
        self._threads = [
            threading.Thread(target=self._shared.read, name=f"specinfer-reader-{number}", daemon=True)
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
        return self._shared.read_bytes

    def rate(self) -> float:
        """Bytes per second of late, while somebody read; the measured rate before the first record."""
        return self._shared.rate() or self._disk.bytes_per_second

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """A pass, in which the caller takes records; one at a time, others wait for their turn.

        The buffer taken last is handed back at its end. What readers met before it began, when nobody
        waited, is tried once more. A pass that has `stopped`, as it is asked before each
        record and ten times a second, ends with StoppedError.
        """
        self._shared.check_open()  # before the lock, which a child by fork may have inherited locked
        if stopped is None:
            turn: AbstractContextManager[object] = self._turn
        else:
            turn = self._turn_unless(stopped)
        with turn:
            self.passes += 1
            self._stopped = stopped
            try:
                self._shared.forget()
                yield self
            finally:
                self._stopped = None
                self._shared.keep_from(max(self._shared.first, self._taken + 1))

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

    def pin(self, records: Collection[int], fill: Callable[[], None]) -> None:
        """Stream all but these records, which lie elsewhere once `fill` has put them there; between passes.

        Those that were pinned, and are not among these, are streamed again before `fill` begins. Whatever it
        raises comes out, and then no more records are pinned than before.
        """
        wanted = frozenset(records)
        with self._turn:
            self._stream_without(self._pinned & wanted)
            fill()
            self._stream_without(wanted)

    def _stream_without(self, pinned: frozenset[int]) -> None:
        if pinned != self._pinned:
            self._pinned = pinned
            self._cycle = [number for number in range(len(self._records)) if number not in pinned]
            self._shared.begin_anew([self._records[number] for number in self._cycle])

    def take(self, record: int) -> int:
        """Wait for a record and return the buffer that holds it until the next take.

        Of a record that is pinned that is one more than there are.
        The buffer taken before goes back to the readers. A record that is not the next one in the cycle is
        reached by giving up those before it; the one that is held is there at once. Interrupts end the wait.

        Raises whatever a reader has raised since, once: the next take begins anew there. Raises
        DamagedFileError for a record that is damaged when it is read for the first time, ClosedError when
        the stream was closed, StoppedError when the pass was.
        """
        if self._is_still:
            return record % len(self.buffers)
        shared = self._shared
        shared.check_open()
        self._check_wanted()
        if record in self._pinned:
            return len(self.buffers)
        shared.raise_or_forget()
        place = shared.first + (bisect_left(self._cycle, record) - shared.first) % len(self._cycle)
        shared.keep_from(place)
        if not shared.has(place):
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
                "the disk of %s does not answer; its readers are left behind", self._shared.source.path
            )

    def _wait(self, place: int) -> None:
        """Wait until a record is there, for as long as that takes; say so when it takes long."""
        record = self._records[self._cycle[place % len(self._cycle)]]
        name, length = record.name, record.length
        began = time.monotonic()
        due = max(began + max(_PATIENCE, _SLOW * length / self.rate()), self._quiet_until)
        try:
            while not self._shared.has(place, ring=True):
                with contextlib.suppress(Empty):
                    # Not a Condition: an interrupt can leave that half done.
                    self._shared.bell.get(timeout=max(0.0, min(_POLL, due - time.monotonic())))
                self._check_wanted()
                if (now := time.monotonic()) >= due:
                    _LOG.warning(
                        "waiting for the disk: %.0f of %.0f MB of %s of %s after %.1f s",
                        *(self._shared.arrived(place) / 1e6, length / 1e6, name),
                        *(self._shared.source.path, now - began),
                    )
                    due = self._quiet_until = now + _BETWEEN
        finally:
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
            self._shared.give_up(place)
            raise DamagedFileError(
                f"{self._shared.source.path}: {kept.name} has a wrong checksum; load the model again"
            )
        self._unchecked.discard(record)
