"""Experts of a mixture that are read from the disk when a router has chosen them.

    memory    slots, each with room for one expert; all layers share them
    want      experts of a layer that a pass needs: readers fetch those that no slot has
    take      waits for one of them

The least used expert gives its slot up. A use counts half after HALF_LIFE passes, so the experts of the
present text stay, and those of its rare tokens go first. A pass never computes with an expert that was not
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, Self, TypeVar

import numpy as np

from specinfer.errors import ensure
from specinfer.kernels.disk import DiskRate, StreamSource
from specinfer.models.stream import StreamRecord, WeightStream

_Made = TypeVar("_Made")
HALF_LIFE: Final = 8  # passes after which a use counts half; docs/decisions/11-offloading.md
_MAX_WEIGHT: Final = 1e100


class ExpertStream(WeightStream, Generic[_Made]):
    """Records of experts, read into a fixed number of slots in memory.

    with stream.passing():
        stream.want(records)
        for record in records:
            products = stream.take(record)
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
        super().__init__(source, records, slots=slots, disk=disk)
        self._make = make
        self._slots: dict[int, int] = {}  # slots by record
        self._held = np.zeros(slots, dtype=np.int64)  # records by slot, of slots that are not free
        self._free = list(range(slots))
        # Uses of each record, and the weight of a use in this pass, which grows instead of older uses ageing.
        self._uses = np.zeros(len(records))
        self._weight = 1.0
        self._made: dict[int, _Made] = {}  # products of records in memory
        self._still: dict[int, _Made] = {}  # while passes are timed

    @property
    def slots(self) -> int:
        """How many experts are in memory at once."""
        return len(self.buffers)

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """Implements WeightStream."""
        with super().passing(stopped):
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
        self._check_running()
        self._uses[[*records]] += self._weight
        needed = [self._slots[record] for record in records if record in self._slots]
        for record in records:
            if record not in self._slots:
                slot = self._free.pop() if self._free else self._given_up(needed)
                self._begin(record, slot)
                self._slots[record] = slot
                self._held[slot] = record
                needed.append(slot)

    def take(self, record: int) -> _Made:
        """Wait for a record and return the result of `make` for it; raises as `WeightStream._loaded`."""
        if self._is_still:
            if record not in self._still:
                self._still[record] = self._make(record, self.buffers[record % self.slots])
            return self._still[record]
        self._still.clear()
        if (made := self._made.get(record)) is not None:
            return made
        if record not in self._slots:
            self.want([record])
        memory = self._loaded(record, self._slots[record])
        self._made[record] = made = self._make(record, memory)
        return made

    def _given_up(self, needed: Sequence[int]) -> int:
        """Return the slot of the least used record; `needed` slots stay."""
        uses = self._uses[self._held]
        uses[[*needed]] = np.inf
        slot = int(uses.argmin())
        record = int(self._held[slot])
        self._made.pop(record, None)
        del self._slots[record]
        return slot
