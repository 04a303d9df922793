"""SharedExchange: reductions between the ranks of one host through shared memory (cpu/exchange.h).

    rank 0                                     rank 1, which inherits the file
    file = shared_file()
    exchange = SharedExchange(library, file, 2, 0)   exchange = SharedExchange(library, file, 2, 1)
    exchange.add(sums)                         exchange.add(sums)        both have the sum

All ranks call the same operations in the same order, with arrays of the same sizes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import PeerLostError
from specinfer.kernels.library import Library

# Bytes exchanged per turn: 42 rows of 1,536 sums. Two slots of every rank fit a core's caches.
SLOT: Final = 1 << 18
_REASONS: Final = ("", "has ended", "did not respond within {limit:g} s", "is at another operation")


def shared_file() -> int:
    """An anonymous file for the memory that ranks share; the caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("specinfer-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as kept:
        return os.dup(kept.fileno())


@dataclass(frozen=True, slots=True)
class ExchangeFigures:
    """Statistics of an exchange."""

    seconds: float  # total time of operations
    waited: float  # part of it spent waiting for other ranks
    turns: int
    bytes: int  # written by this rank


class SharedExchange:
    """A rank's end of the shared memory; `address` is the library's handle.

    After the loss of a rank every operation raises PeerLostError.
    """

    __slots__ = ("_library", "_limit", "_memory", "address", "rank", "ranks", "slot")

    def __init__(
        self, library: Library, file: int, ranks: int, rank: int, *, slot: int = SLOT, limit: float = 10.0
    ) -> None:
        """`file` is from `shared_file`, the same for all ranks, and may be closed afterwards.

        `limit` is the number of seconds that a turn waits for another rank.
        """
        size = library.exchange_bytes(ranks, slot)
        os.ftruncate(file, size)  # the first rank grows it; existing content is kept
        self._memory: mmap.mmap | None = mmap.mmap(file, size)
        self._library = library
        self.ranks, self.rank, self.slot = ranks, rank, slot
        place = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address: int = library.exchange_new(place, ranks, rank, slot)
        self.wait_at_most(limit)

    def wait_at_most(self, seconds: float) -> None:
        """Let each turn wait so long for another rank."""
        self._limit = seconds
        self._library.exchange_set_limit(self.address, seconds)

    def largest(self, numbers: NDArray[np.float32]) -> None:
        """Element-wise maximum over all ranks, in place; NaN exceeds all numbers, which are >= 0."""
        where = _in_place(numbers, np.float32)
        self._check_done(self._library.exchange_largest(self.address, where, numbers.size))

    def add(self, numbers: NDArray[np.int32]) -> None:
        """Element-wise sum over all ranks, in place."""
        where = _in_place(numbers, np.int32)
        self._check_done(self._library.exchange_add(self.address, where, numbers.size))

    def gather(self, own: NDArray[Any], sizes: Sequence[int], *, reads: bool = True) -> list[memoryview]:
        """Gather every rank's bytes, with sizes known to all ranks; returns nothing unless `reads`.

        Raises ValueError if `own` has another size.
        """
        if own.nbytes != sizes[self.rank] or not own.flags.c_contiguous:
            raise ValueError(f"rank {self.rank} gives {sizes[self.rank]} contiguous bytes, got {own.nbytes}")
        counts = (ctypes.c_int64 * self.ranks)(*sizes)
        into = np.empty(sum(sizes) if reads else 0, dtype=np.uint8)
        self._check_done(
            self._library.exchange_gather(
                *(self.address, own.ctypes.data, ctypes.addressof(counts)),
                into.ctypes.data if reads else None,
            )
        )
        ends = np.cumsum(sizes)
        return [into.data[end - size : end] for end, size in zip(ends, sizes, strict=True)] if reads else []

    def check(self) -> None:
        """Raise PeerLostError if a rank is lost."""
        rank = ctypes.c_int32()
        why = self._library.exchange_loss(self.address, ctypes.addressof(rank))
        if why:
            words = _REASONS[why].format(limit=self._limit)
            raise PeerLostError(
                f"rank {rank.value} of {self.ranks} {words}, detected by rank {self.rank}; "
                "all ranks of this group must be restarted",
                rank.value,
            )

    def figures(self) -> ExchangeFigures:
        """Statistics since the start."""
        found = (ctypes.c_int64 * 4)()
        self._library.exchange_figures(self.address, ctypes.addressof(found))
        return ExchangeFigures(found[0] * 1e-9, found[1] * 1e-9, found[2], found[3])

    def close(self) -> None:
        """Release the memory; no operation may follow."""
        if self._memory is None:
            return
        self._library.exchange_free(self.address)
        self._memory = None  # native structures with its address belong to the closed exchange

    def _check_done(self, done: int) -> None:
        if not done:
            self.check()


def _in_place(numbers: NDArray[Any], dtype: type[np.generic]) -> int:
    if numbers.dtype != dtype or not numbers.flags.c_contiguous or not numbers.flags.writeable:
        raise ValueError(f"numbers must be contiguous {np.dtype(dtype)} to be changed, got {numbers.dtype}")
    return int(numbers.ctypes.data)
