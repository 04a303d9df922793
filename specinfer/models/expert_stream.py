"""Experts of a mixture that are read from the disk when a router has chosen them.

    memory    slots, each with room for one expert; all layers share them
    want      experts of a layer that a pass needs: readers fetch those that no slot has
    take      waits for one of them

The least used expert gives its slot up. A use counts half after HALF_LIFE passes, so the experts of the
present text stay, and those of its rare tokens go first. A pass never computes with an expert that was not
chosen.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, NamedTuple, Self, TypeVar

import numpy as np

from specinfer.errors import ClosedError, DamagedFileError, ensure
from specinfer.kernels.disk import PAGE, DiskRate, StreamSource, aligned
from specinfer.models.stream import WeightStream, kept_from_children, start_readers
from specinfer.models.stream_buffers import StreamRecord

_Made = TypeVar("_Made")
HALF_LIFE: Final = 8  # passes after which a use counts half; docs/decisions/11-offloading.md
_MAX_WEIGHT: Final = 1e100
_MIN_PIECE: Final = 64 * PAGE  # bytes: smaller ones cost more calls than they save


class _SlotPiece(NamedTuple):
    slot: int
    memory: memoryview
    offset: int


class ExpertReaders:
    """State shared by reader threads and the thread that computes; it may outlive the stream."""

    def __init__(self, source: StreamSource, piece: int, readers: int) -> None:
        self.bell: SimpleQueue[None] = SimpleQueue()  # rings when a slot is full, or has failed
        self.read_bytes = 0
        self._source = source
        self._piece, self._readers = piece, readers
        self._pieces: SimpleQueue[_SlotPiece | None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: a thread that holds it may collect the stream as garbage
        self._left: dict[int, int] = {}  # bytes on their way, by slot
        self._errors: dict[int, BaseException] = {}
        self._closed = False
        self._process = os.getpid()

    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a child by fork, without a lock."""
        if os.getpid() != self._process:
            raise ClosedError("a child by fork has no readers of weights; load the model in the child")
        if self._closed:
            raise ClosedError("the model was closed, and its weights are no longer read")

    def begin(self, slot: int, memory: memoryview, offset: int) -> None:
        """Queue a read of `memory` from `offset` on, split among readers."""
        length = len(memory)
        piece = max(_MIN_PIECE, -(-length // self._readers // PAGE) * PAGE)
        piece = min(piece, self._piece)
        with self._lock:
            self._left[slot] = length
            self._errors.pop(slot, None)
        for begin in range(0, length, piece):
            self._pieces.put(_SlotPiece(slot, memory[begin : begin + piece], offset + begin))

    def there(self, slot: int) -> bool:
        """Return True if a slot was read; raises a reader's error after all its reads have ended."""
        with self._lock:
            if self._closed:
                self.check_open()
            if self._left.get(slot, 0):
                return False
            if (error := self._errors.pop(slot, None)) is not None:
                raise error
            return True

    def failed(self, slot: int) -> bool:
        """Whether a slot was not filled."""
        return not self.left(slot) and slot in self._errors

    def left(self, slot: int) -> int:
        """Bytes of a slot that are on their way."""
        return self._left.get(slot, 0)

    def close(self) -> None:
        """Stop readers after their current piece."""
        if os.getpid() != self._process:
            return
        self._closed = True
        for _ in range(self._readers):
            self._pieces.put(None)
        self.bell.put(None)

    def read(self) -> None:
        """Read until `close`: the work of one reader."""
        while (piece := self._pieces.get()) is not None:
            error: BaseException | None = None
            if not self._closed:
                try:
                    self._source.read_into(piece.memory, piece.offset)
                    self._source.check()
                except BaseException as met:  # raised where it matters, by the thread that computes
                    error = met
            self._arrived(piece, error)
            del piece, error  # so that this thread does not keep the memory alive

    def _arrived(self, piece: _SlotPiece, error: BaseException | None) -> None:
        with self._lock:
            self._left[piece.slot] -= len(piece.memory)
            if error is None:
                self.read_bytes += len(piece.memory)
            else:
                self._errors[piece.slot] = error
            if not self._left[piece.slot]:
                self.bell.put(None)


class ExpertStream(WeightStream, Generic[_Made]):
    """Records of experts, read into a fixed number of slots in memory.

        with stream.passing():
            stream.want(records)
            for record in records:
                products = stream.take(record)

    Readers end with `close`, or when the stream is garbage; a child by fork has none.
    """

    def __init__(
        self,
        source: StreamSource,
        records: Sequence[StreamRecord],
        make: Callable[[int, memoryview], _Made],
        *,
        slots: int,
        disk: DiskRate,
    ) -> None:
        """`make` makes what `take` returns of a record's number and of the memory that it is in."""
        ensure(slots > 0 and bool(records), "experts have slots")
        super().__init__(source.path, disk)
        longest = max(record.length for record in records)
        memory = memoryview(kept_from_children(aligned(longest * slots)))
        self._memories = [memory[slot * longest : (slot + 1) * longest] for slot in range(slots)]
        self._records = records
        self._make = make
        self._slots: dict[int, int] = {}  # slots by record
        self._held = np.zeros(slots, dtype=np.int64)  # records by slot, of slots that are not free
        self._free = list(range(slots))
        # Uses of each record, and the weight of a use in this pass, which grows instead of older uses ageing.
        self._uses = np.zeros(len(records))
        self._weight = 1.0
        self._made: dict[int, _Made] = {}  # products of records in memory
        self._still: dict[int, _Made] = {}  # while passes are timed
        self._unchecked = {number for number, record in enumerate(records) if record.crc is not None}
        self._readers = ExpertReaders(source, disk.piece, disk.readers)
        self._end = weakref.finalize(self, self._readers.close)
        self._end.atexit = False  # not run at interpreter exit
        try:
            self._threads = start_readers(self._readers.read, disk.readers)
        except RuntimeError:  # no more threads in this process
            self._end()
            raise

    @property
    def read_bytes(self) -> int:
        """Implements WeightStream."""
        return self._readers.read_bytes

    @property
    def slots(self) -> int:
        """How many experts are in memory at once."""
        return len(self._memories)

    def rate(self) -> float:
        """As measured when the model was loaded."""
        return self._disk.bytes_per_second

    def check_open(self) -> None:
        """Implements WeightStream."""
        self._readers.check_open()

    def close(self) -> None:
        """Implements WeightStream."""
        self._end()
        self._end_threads(self._threads)

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """Implements WeightStream."""
        with super().passing(stopped):
            for record, slot in [*self._slots.items()]:
                if self._readers.failed(slot):
                    del self._slots[record]
                    self._free.append(slot)
            self._weight *= 2 ** (1 / HALF_LIFE)
            if self._weight > _MAX_WEIGHT:
                self._uses /= self._weight
                self._weight = 1.0
            yield self

    def want(self, records: Sequence[int]) -> None:
        """Start reading the missing ones of these records; at most `slots`.

        Raises ClosedError when the stream was closed, StoppedError when the pass was.
        """
        if self._is_still:
            return
        ensure(len(records) <= self.slots, "all experts of a layer have slots")
        self.check_open()
        self._check_stopped()
        self._uses[[*records]] += self._weight
        needed = [self._slots[record] for record in records if record in self._slots]
        for record in records:
            if record not in self._slots:
                slot = self._free.pop() if self._free else self._given_up(needed)
                one = self._records[record]
                self._readers.begin(slot, self._memories[slot][: one.length], one.offset)
                self._slots[record] = slot
                self._held[slot] = record
                needed.append(slot)

    def take(self, record: int) -> _Made:
        """Wait for a record and return the result of `make` for it.

        Raises a reader's error, DamagedFileError if the first read of a record finds it damaged, and the
        errors of `want`.
        """
        if self._is_still:
            if record not in self._still:
                self._still[record] = self._make(record, self._memories[record % self.slots])
            return self._still[record]
        self._still.clear()
        if (made := self._made.get(record)) is not None:
            return made
        if record not in self._slots:
            self.want([record])
        slot, one = self._slots[record], self._records[record]
        try:
            if not self._readers.there(slot):
                self._wait(*self._awaited(record), there=partial(self._readers.there, slot))
            memory = self._memories[slot][: one.length]
            if record in self._unchecked and zlib.crc32(memory) != one.crc:
                raise DamagedFileError(f"{self._path}: {one.name} has a wrong checksum; load the model again")
        except BaseException:
            if not self._readers.left(slot):  # no reader writes to it
                del self._slots[record]
                self._free.append(slot)
            raise
        self._unchecked.discard(record)
        self._made[record] = made = self._make(record, memory)
        return made

    def _given_up(self, needed: Sequence[int]) -> int:
        """Return the slot of the least used record, after its reads have ended; `needed` slots stay."""
        uses = self._uses[self._held]
        uses[[*needed]] = np.inf
        slot = int(uses.argmin())
        record = int(self._held[slot])
        while self._readers.left(slot):  # of a pass that was stopped
            self._wait(*self._awaited(record), there=lambda: not self._readers.left(slot))
        self._made.pop(record, None)
        del self._slots[record]
        return slot

    def _awaited(self, record: int) -> tuple[StreamRecord, SimpleQueue[None], Callable[[], int]]:
        """A record, what rings when it may be there, and what counts its bytes."""
        slot, one = self._slots[record], self._records[record]

        def arrived() -> int:
            return one.length - self._readers.left(slot)

        return one, self._readers.bell, arrived
