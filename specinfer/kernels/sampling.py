"""Native scans of logits; cpu/sampling.h specifies their results."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ensure
from specinfer.kernels.library import Library
from specinfer.kernels.structures import TYPES
from specinfer.processors.changes import Changes
from specinfer.verify.scan import (
    SAMPLE_REQUEST,
    Likeliest,
    LogitBlock,
    SampleRequest,
    Scan,
    changed_row,
    check_rows,
    choice,
)
from specinfer.verify.target_law import HOTTEST, NUMPY_ROW, Law

_REQUEST: Final = struct.Struct("=dqddQq")  # one sampling request
_UNDECIDED: Final = -2  # as in cpu/sampling.h


class NativeScan(Scan):
    """Scans rows in place, using all threads for many rows."""

    __slots__ = ("_library",)

    def __init__(self, library: Library) -> None:
        self._library = library

    def likeliest(
        self, logits: LogitBlock, rows: NDArray[np.int64], n: int, temperatures: NDArray[np.float64]
    ) -> Likeliest:
        """See Scan."""
        count = len(rows)
        if n < 1:
            raise ValueError(f"got n = {n}; allowed: n >= 1")
        _check("temperatures", temperatures, np.dtype(np.float64), count)
        # One array for all results, since taking an address costs more than a view.
        ids_end = count * n
        counts_end, masses_end = ids_end + count, ids_end + 2 * count
        numbers = np.empty(masses_end + (ids_end + 1) // 2, dtype=np.int64)
        at = numbers.ctypes.data
        there = self._library.likeliest(
            *_block_args(logits, rows),
            *(n, temperatures.ctypes.data, at, at + 8 * masses_end, at + 8 * ids_end, at + 8 * counts_end),
        )
        if not there:
            check_rows(logits, rows)
        return Likeliest(
            ids=numbers[:ids_end].reshape(count, n),
            values=numbers[masses_end:].view(np.float32)[:ids_end].reshape(count, n),
            found=numbers[ids_end:counts_end],
            masses=numbers[counts_end:masses_end].view(np.float64),
        )

    def choices(
        self,
        logits: LogitBlock,
        rows: NDArray[np.int64],
        requests: NDArray[np.void],
        changes: Changes | None = None,
    ) -> NDArray[np.int64]:
        """See Scan; where rounding may decide, `verify.scan.choice` decides."""
        _check("requests", requests, SAMPLE_REQUEST, len(rows))
        ids = np.empty(len(rows), dtype=np.int64)
        undecided = self._library.choices(
            *_block_args(logits, rows),
            requests.ctypes.data,
            *_change_args(changes, len(rows)),
            ids.ctypes.data,
        )
        if undecided:
            check_rows(logits, rows, changes)
            for place in np.flatnonzero(ids == _UNDECIDED).tolist():
                row = changed_row(logits, int(rows[place]), changes, place)
                ids[place] = choice(row, requests[place], self)
        return ids

    def chosen(self, logits: LogitBlock, rows: Sequence[int], requests: Sequence[SampleRequest]) -> list[int]:
        """See Scan; avoids NumPy, which a pass has evicted from the caches."""
        count = len(rows)
        if len(requests) != count:
            raise ValueError(f"got {len(requests)} requests for {count} rows")
        numbers = array("q", rows)
        numbers.extend(rows)  # room for the results
        at, _ = numbers.buffer_info()
        undecided = self._library.choices(
            *(TYPES[logits.dtype], logits.address, len(logits), logits.vocab, logits.stride, at, count),
            *(b"".join([_REQUEST.pack(*one) for one in requests]), None, None, None, at + 8 * count),
        )
        if undecided:
            given = np.array(rows, dtype=np.int64), np.array(requests, dtype=SAMPLE_REQUEST)
            ids: list[int] = self.choices(logits, *given).tolist()
            return ids
        return numbers[count:].tolist()

    def most_likely(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
        """The ids of the n >= 1 largest logits, descending, ties lowest id first; -inf is never included."""
        row = _row(logits)
        ensure(n >= 1, "at least one token is wanted")
        ids = np.empty(min(n, row.size), dtype=np.int64)
        found: int = self._library.most_likely(row.ctypes.data, row.size, n, ids.ctypes.data)
        return ids[:found]

    def mass(self, logits: NDArray[np.float32], highest: float, temperature: float) -> float:
        """The sum of exp((logit - highest) / temperature), to a relative error of `row_scan.MASS_ERROR`."""
        row = _row(logits)
        mass: float = self._library.mass(row.ctypes.data, row.size, highest, temperature)
        return mass

    def racers(self, law: Law, key: int) -> NDArray[np.int64]:
        """The entries of the support that may win within rounding, ascending: one, unless there is a tie."""
        if law.temperature > HOTTEST:
            return NUMPY_ROW.racers(law, key)
        row = _row(law.logits)
        ensure(0 <= law.top < row.size, "the likeliest token is in the support")
        ids = None if law.ids is None else np.ascontiguousarray(law.ids, dtype=np.int64)
        ensure(ids is None or ids.shape == row.shape, "each logit of a support has an id")
        indices = np.empty(row.size, dtype=np.int64)
        found: int = self._library.racers(
            row.ctypes.data,
            row.size,
            None if ids is None else ids.ctypes.data,
            law.top,
            law.temperature,
            key,
            indices.ctypes.data,
        )
        return indices[:found].copy()


def _block_args(logits: LogitBlock, rows: NDArray[np.int64]) -> tuple[int, int, int, int, int, int, int]:
    """A block and some of its rows as arguments of the library."""
    _check("rows", rows, np.dtype(np.int64), len(rows))
    code = TYPES[logits.dtype]
    return code, logits.address, len(logits), logits.vocab, logits.stride, rows.ctypes.data, len(rows)


def _change_args(changes: Changes | None, rows: int) -> tuple[int | None, int | None, int | None]:
    """The changes of `rows` rows as arguments of the library."""
    if changes is None or not rows:
        return None, None, None
    ids, terms, ends = changes
    _check("the ends of changes", ends, np.dtype(np.int64), rows)
    _check("the tokens of changes", ids, np.dtype(np.int64), int(ends[-1]))
    _check("the terms of changes", terms, np.dtype(np.float32), len(ids), 4)
    return ids.ctypes.data, terms.ctypes.data, ends.ctypes.data


def _check(name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], *shape: int) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise TypeError(
            f"{name} must be contiguous {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}"
        )


def _row(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if logits.dtype != np.float32 or logits.ndim != 1:
        raise TypeError(f"expected a row of float32 logits, got {logits.dtype} {list(logits.shape)}")
    return np.ascontiguousarray(logits)
