"""Experts of a mixture that are read from the disk when a router has chosen them.

    memory    slots, each with room for one expert; all layers share them
    want      experts of a layer that a pass needs: readers fetch those that no slot has
    take      waits for one of them

The least used expert gives its slot up. A use counts half after HALF_LIFE passes, so the experts of the
present text stay, and those of its rare tokens go first. A pass never computes with an expert that was not
chosen.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Self

import numpy as np
from torch import Tensor

from specinfer.errors import ensure
from specinfer.kernels.disk import DiskRate, StreamSource
from specinfer.kernels.product import Product
from specinfer.models.prepared import PreparedFile, Record
from specinfer.models.stream import WeightStream
from specinfer.progress import Progress

Pair = tuple[Product, Product]
MakeProduct = Callable[[Record, memoryview], Product]  # a product over memory with a record
HALF_LIFE: Final = 8  # passes after which a use counts half; docs/decisions/11-offloading.md
_MAX_WEIGHT: Final = 1e100
_EXPERT: Final = re.compile(r".*\blayers\.\d+\.mlp\.experts\.\d+")


def expert_records(file: PreparedFile) -> list[str]:
    """The names of a prepared mixture's experts, layer by layer."""
    return [name for name in file.records if _EXPERT.fullmatch(name)]


class ExpertStream(WeightStream):
    """The experts of all layers, read into a fixed number of slots in memory.

    with stream.passing():
        stream.want(experts)
        for expert in experts:
            products = stream.take(expert)
    """

    def __init__(self, file: PreparedFile, *, slots: int, disk: DiskRate) -> None:
        names = expert_records(file)
        super().__init__(StreamSource(file.path), file.stream_records(names), slots=slots, disk=disk)
        self.numbers = {name: number for number, name in enumerate(names)}
        self._places = [file.records[name] for name in names]
        self._makers: dict[int, tuple[MakeProduct, MakeProduct]] = {}
        self._slots: dict[int, int] = {}  # slots by expert
        self._held = np.zeros(slots, dtype=np.int64)  # experts by slot, of slots that are not free
        self._free = list(range(slots))
        # Uses of each expert, and the weight of a use in this pass, which grows instead of older uses ageing.
        self._uses = np.zeros(len(names))
        self._weight = 1.0
        self._made: dict[int, Pair] = {}  # products of experts in memory
        self._still: dict[int, Pair] = {}  # while passes are timed

    @property
    def slots(self) -> int:
        """How many experts are in memory at once."""
        return len(self.buffers)

    def products(self, name: str, makers: tuple[MakeProduct, MakeProduct]) -> Pair:
        """The two products of the expert with this record, which wait for it."""
        number = self.numbers[name]
        self._makers[number] = makers
        return partial(_times, self, number, 0), partial(_times, self, number, 1)

    @contextmanager
    def passing(self, stopped: Callable[[], bool] | None = None) -> Iterator[Self]:
        """Implements WeightStream."""
        with super().passing(stopped):
            self._weight *= 2 ** (1 / HALF_LIFE)
            if self._weight > _MAX_WEIGHT:
                self._uses /= self._weight
                self._weight = 1.0
            yield self

    def want_of_layer(self, first: str, numbers: Sequence[int]) -> None:
        """Start reading these experts of a layer, whose number 0 has the record `first`; see `want`."""
        begin = self.numbers[first]
        self.want([begin + number for number in numbers])

    def want(self, experts: Sequence[int]) -> None:
        """Start reading the missing ones of these experts; at most `slots`.

        Raises ClosedError when the stream was closed, StoppedError when the pass was.
        """
        if self._is_still:
            return
        ensure(len(experts) <= self.slots, "all experts of a layer have slots")
        self._check_running()
        self._uses[[*experts]] += self._weight
        needed = [self._slots[expert] for expert in experts if expert in self._slots]
        for expert in experts:
            if expert not in self._slots:
                slot = self._free.pop() if self._free else self._given_up(needed)
                self._begin(expert, slot)
                self._slots[expert] = slot
                self._held[slot] = expert
                needed.append(slot)

    def take(self, expert: int) -> Pair:
        """Wait for an expert and return its products; raises as `WeightStream._loaded`."""
        if self._is_still:
            if expert not in self._still:
                self._still[expert] = self._over(expert, self.buffers[expert % self.slots])
            return self._still[expert]
        self._still.clear()
        if (made := self._made.get(expert)) is not None:
            return made
        if expert not in self._slots:
            self.want([expert])
        memory = self._loaded(expert, self._slots[expert])
        self._made[expert] = made = self._over(expert, memory)
        return made

    def check(self, progress: Progress) -> None:
        """Read each expert once; raises DamagedFileError unless it is what was written."""
        step = max(1, self.slots // 2)
        with self.passing():
            for begin in range(0, len(self._places), step):
                some = range(begin, min(begin + step, len(self._places)))
                self.want(some)
                for number in some:
                    self.take(number)
                    progress.advance(self._places[number].length)

    def _over(self, expert: int, memory: memoryview) -> Pair:
        first, last = self._makers[expert]
        return first(self._places[expert], memory), last(self._places[expert], memory)

    def _given_up(self, needed: Sequence[int]) -> int:
        """Return the slot of the least used expert; `needed` slots stay."""
        uses = self._uses[self._held]
        uses[[*needed]] = np.inf
        slot = int(uses.argmin())
        expert = int(self._held[slot])
        self._made.pop(expert, None)
        del self._slots[expert]
        return slot


def _times(stream: ExpertStream, expert: int, which: int, x: Tensor) -> Tensor:
    return stream.take(expert)[which](x)
