"""Placement: which layers stay in memory and which are streamed; arithmetic on byte counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from specinfer.errors import CapacityError
from specinfer.kernels.disk import DiskRate, about, gigabytes
from specinfer.models.config import Experts

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """The experts of a mixture, and how many are in memory at once; others are read when they are chosen."""

    experts: Experts
    layers: int  # that have experts
    record: int  # bytes of one expert, at the most
    slots: int = 0  # experts in memory

    @property
    def all(self) -> int:
        """How many experts there are."""
        return self.layers * self.experts.count

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.record

    def active_bytes(self, rows: int) -> float:
        """Return the expected bytes of the experts in a pass of `rows`, if each row chose at random."""
        return self.layers * self.experts.active(rows) * self.record

    def read_bytes(self, rows: int) -> float:
        """Return the expected bytes read in a pass, if each expert is in memory with equal probability."""
        return self.active_bytes(rows) * (1 - self.slots / self.all)


@dataclass(frozen=True)
class Placement:
    """Pinned and streamed layers within a memory limit.

    Streamed layers are spread evenly over the model, so that readers work while pinned layers compute.
    All layers of a mixture are pinned, but not their experts, which have slots.
    """

    memory: int  # bytes that the process may use
    fixed: Mapping[str, int]  # bytes by name, other than layers
    layers: Sequence[int]  # bytes per layer
    buffers: int  # buffers of streamed layers, each of the size of the largest; 0: none is streamed
    streamed: tuple[int, ...]  # layer numbers
    experts: ExpertMemory | None = None

    @classmethod
    def within(
        cls, memory: int, fixed: Mapping[str, int], layers: Sequence[int], *, buffers: int = 2
    ) -> Self:
        """The placement that streams the fewest bytes.

        Raises CapacityError if `memory` cannot hold the fixed parts and the buffers. More memory never
        streams more bytes.
        """
        ways = [
            cls(memory, fixed, layers, buffers if count else 0, spread(count, len(layers)))
            for count in range(len(layers) + 1)
        ]
        fitting = [way for way in ways if way.resident_bytes <= memory]
        if not fitting:
            raise CapacityError(min(ways, key=lambda way: way.resident_bytes)._refusal())
        return min(fitting, key=lambda way: (way.streamed_bytes, len(way.streamed)))

    @classmethod
    def with_experts(
        cls, memory: int, fixed: Mapping[str, int], layers: Sequence[int], experts: ExpertMemory
    ) -> Self:
        """The placement that has as many experts in memory as fit; `layers` are without them.

        Raises CapacityError where `memory` has no room for those of one layer.
        """
        slots = (memory - sum(fixed.values()) - sum(layers)) // experts.record
        least = experts.experts.count
        experts = replace(experts, slots=min(max(slots, least), experts.all))
        found = cls(memory, fixed, layers, 0, (), experts)
        if slots < least:
            raise CapacityError(found._refusal())
        return found

    @cached_property
    def pinned(self) -> tuple[int, ...]:
        """Numbers of the layers that stay in memory."""
        return tuple(sorted(set(range(len(self.layers))).difference(self.streamed)))

    @property
    def streamed_bytes(self) -> int:
        """Bytes read in each pass; of a mixture the expected bytes of a pass of one row."""
        experts = 0 if self.experts is None else int(self.experts.read_bytes(1))
        return experts + sum(self.layers[number] for number in self.streamed)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.buffers * max((self.layers[number] for number in self.streamed), default=0)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes used by fixed parts, pinned layers, buffers and slots of experts."""
        pinned = sum(self.layers[number] for number in self.pinned)
        experts = 0 if self.experts is None else self.experts.bytes
        return sum(self.fixed.values()) + pinned + self.buffer_bytes + experts

    def seconds(self, bytes_per_second: float) -> float:
        """Disk time of a pass."""
        return self.streamed_bytes / bytes_per_second

    def summary(self, disk: DiskRate, folder: Path) -> str:
        """The placement and its cost per pass in one line; `folder` holds the layers."""
        count = len(self.layers)
        home = Path.home()
        place = f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else f"{folder}"
        if (room := self.experts) is not None:
            return (
                f"{room.slots} of {room.all} experts in memory, others read when chosen: about "
                f"{gigabytes(self.streamed_bytes)} a token at {gigabytes(disk.bytes_per_second)}/s from "
                f"{place}, {about(self.seconds(disk.bytes_per_second))} s"
            )
        if not self.streamed:
            return f"all {count} layers kept in memory"
        return (
            f"{len(self.streamed)} of {count} layers streamed, {gigabytes(self.streamed_bytes)} a pass at "
            f"{gigabytes(disk.bytes_per_second)}/s from {place}, about "
            f"{about(self.seconds(disk.bytes_per_second))} s a pass"
        )

    def _refusal(self) -> str:
        parts = {**self.fixed}
        if self.buffers:
            parts[f"{self.buffers} layer buffers"] = self.buffer_bytes
        if self.pinned:
            parts["layers"] = sum(self.layers[number] for number in self.pinned)
        if self.experts is not None:
            parts["experts of a layer"] = self.experts.bytes
        summed = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        return (
            f"the model needs at least {summed} = {_gib(self.resident_bytes, up=True)}, but may take "
            f"{_gib(self.memory)}; raise --memory, or choose a smaller draft, kv_cache_memory or quantization"
        )


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` numbers of layers, spaced as evenly as possible."""
    return tuple(n for n in range(layers) if (n + 1) * count // layers > n * count // layers)


def _gib(size: int, *, up: bool = False) -> str:
    """Bytes as text; `up` rounds up."""
    unit, name = (_MIB << 10, "GiB") if size >= 10 * _MIB else (_MIB, "MiB")
    hundredths = -(-100 * size // unit) if up else 100 * size // unit
    return f"{hundredths / 100:.2f} {name}"
