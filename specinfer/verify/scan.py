"""Rows of logits as a model left them, and what is asked of many: likeliest tokens, the target's choices.

A pass yields a block of rows, and what a step wants of most of them is a few numbers. So they are read where
they lie, all in one call: natively (kernels/sampling.py) on all threads, here row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import LogitsError
from specinfer.processors.changes import Changes
from specinfer.sampling_params import SamplingParams
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.target_law import RowScan, target_law

LogitType = Literal["float32", "bfloat16"]
_Rows = NDArray[np.float32] | NDArray[np.uint16]
_TYPES: Final[dict[np.dtype[np.generic], LogitType]] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.uint16): "bfloat16",
}
# How a token is chosen: one of these a row. cpu/sampling.h has the same.
ASK: Final = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("position", np.int64),  # absolute, of the token to choose
    ]
)
Ask = tuple[float, int, float, float, int, int]  # an entry of an array of ASK
NO_TOKEN: Final = -1
_LARGEST: Final = 2**62  # of a top_k: it keeps every token


class LogitBlock:
    """Logits, [R, V], of float32 or bfloat16; a row is made float32 when somebody looks at it.

    A walk down a tree looks at few rows, and one of a large vocabulary is half a megabyte; scans of many rows
    (verify/scan.py) read them where they lie.
    """

    __slots__ = ("_count", "_rows_RV", "_show", "address", "dtype", "stride", "vocab")

    def __init__(self, rows_RV: _Rows) -> None:
        """Keep `rows_RV`: float32, or uint16, the bits of bfloat16, which NumPy has not.

        Raises TypeError for another dtype or shape, and for rows whose elements do not lie side by side.
        """
        kind, size = _TYPES.get(rows_RV.dtype), rows_RV.itemsize
        if kind is None or rows_RV.ndim != 2 or (rows_RV.shape[1] > 1 and rows_RV.strides[1] != size):
            raise TypeError(
                "logits must be [R, V] of float32, or of uint16 as bits of bfloat16, each row in one piece; "
                f"got {rows_RV.dtype} {list(rows_RV.shape)}, {rows_RV.strides} bytes apart"
            )
        self._rows_RV: _Rows | None = rows_RV
        self._show: Callable[[], _Rows] = lambda: rows_RV
        self._count = len(rows_RV)
        self.dtype: LogitType = kind
        self.vocab: int = rows_RV.shape[1]
        self.address: int = rows_RV.ctypes.data
        self.stride = rows_RV.strides[0] // size  # elements from a row to the next

    @classmethod
    def lying_at(
        cls,
        address: int,
        dtype: LogitType,
        shape: tuple[int, int],
        show: Callable[[], _Rows],
    ) -> LogitBlock:
        """Contiguous rows, [R, V], read there by native scans; `show` keeps them and shows them to others."""
        block = cls.__new__(cls)
        block._rows_RV, block._show = None, show
        block._count, block.vocab = shape
        block.address, block.dtype, block.stride = address, dtype, block.vocab
        return block

    @property
    def rows_RV(self) -> _Rows:
        """All rows, float32, or uint16 as the bits of bfloat16."""
        if self._rows_RV is None:
            self._rows_RV = self._show()
        return self._rows_RV

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self._count * self.vocab * (4 if self.dtype == "float32" else 2)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        if self.dtype == "float32":
            row: NDArray[np.float32] = self.rows_RV[index]
            return row
        made = np.empty(self.vocab, dtype=np.float32)
        self.copy(index, made)
        return made

    def copy(self, index: int, into: NDArray[np.float32]) -> None:
        """Write a row as float32 to `into`, [V]."""
        if self.dtype == "float32":
            into[:] = self.rows_RV[index]
        else:  # the upper half of a float32
            np.left_shift(self.rows_RV[index], 16, out=into.view(np.uint32), dtype=np.uint32)


class Likeliest(NamedTuple):
    """The likeliest tokens of some rows."""

    ids: NDArray[np.int64]  # [R, n]: likeliest first, ties lowest id first; NO_TOKEN behind the last
    values: NDArray[np.float32]  # [R, n]: their logits; -inf behind the last
    found: NDArray[np.int64]  # [R]: how many there are
    masses: NDArray[np.float64]  # [R]: as `RowScan.mass` beside the largest logit; NaN where none is found


class Scan(RowScan):
    """Reads of logits, which are never mutated: in NumPy, row by row; natively in kernels/sampling.py.

    Rows are named by their numbers in the block, int64, in any order and more than once. A row whose largest
    logit is not finite (NaN, +inf, or all -inf) has no tokens. Raises IndexError for a row the block lacks.
    """

    __slots__ = ()

    def likeliest(
        self, logits: LogitBlock, rows: NDArray[np.int64], n: int, temperatures: NDArray[np.float64]
    ) -> Likeliest:
        """The n >= 1 likeliest tokens of each row, and its mass at the row's temperature, above zero."""
        check_rows(logits, rows)
        found = no_likeliest(len(rows), n)
        for place, (row, temperature) in enumerate(zip(rows.tolist(), temperatures.tolist(), strict=True)):
            logits_V = logits[row]
            highest = float(logits_V.max())
            if not np.isfinite(highest):
                continue
            ids = self.most_likely(logits_V, n)
            count = found.found[place] = len(ids)
            found.ids[place, :count] = ids
            found.values[place, :count] = logits_V[ids]
            found.masses[place] = self.mass(logits_V, highest, temperature)
        return found

    def choices(
        self,
        logits: LogitBlock,
        rows: NDArray[np.int64],
        asks: NDArray[np.void],
        changes: Changes | None = None,
    ) -> NDArray[np.int64]:
        """The target's own choice in each row, [R], as `choice` makes it; NO_TOKEN where there is none.

        `asks` are of dtype ASK, [R]; `changes` are made of R rows before their choices, and not seen by
        others. Raises IndexError where they change a token the rows lack.
        """
        check_rows(logits, rows, changes)
        chosen = [
            choice(changed_row(logits, row, changes, place), one, self)
            for place, (row, one) in enumerate(zip(rows.tolist(), asks, strict=True))
        ]
        return np.array(chosen, dtype=np.int64)

    def chosen(self, logits: LogitBlock, rows: Sequence[int], asks: Sequence[Ask]) -> list[int]:
        """The same, from lists to a list: where rows are few, arrays take longer to make than to read."""
        numbers = np.array(rows, dtype=np.int64)
        ids: list[int] = self.choices(logits, numbers, np.array(asks, dtype=ASK)).tolist()
        return ids


NUMPY: Final = Scan()


def ask(params: SamplingParams, seed: int, position: int) -> Ask:
    """How these parameters choose the token at an absolute position."""
    top_k = min(params.top_k, _LARGEST)
    return params.temperature, top_k, params.top_p, params.min_p, seed, position


def choice(logits_V: NDArray[np.float32], one: np.void, scan: RowScan) -> int:
    """The target's own choice in one row, for one entry of an ASK array; NO_TOKEN where there is none."""
    temperature, top_k, top_p, min_p, seed, position = one.item()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    try:
        law = target_law(logits_V, params, scan)
    except LogitsError:
        return NO_TOKEN
    return coupled_choice(law, seed, position, scan)


def changed_row(logits: LogitBlock, row: int, changes: Changes | None, place: int) -> NDArray[np.float32]:
    """The row as the changes at that place leave it, [vocab]; not to be written to."""
    if changes is None or not len((own := changes.row(place)).ids):
        return logits[row]
    changed = np.empty(logits.vocab, dtype=np.float32)
    logits.copy(row, changed)
    own.apply(changed)
    return changed


def no_likeliest(rows: int, n: int) -> Likeliest:
    """Nothing found in any row, yet."""
    return Likeliest(
        np.full((rows, n), NO_TOKEN, dtype=np.int64),
        np.full((rows, n), -np.inf, dtype=np.float32),
        np.zeros(rows, dtype=np.int64),
        np.full(rows, np.nan),
    )


def check_rows(logits: LogitBlock, rows: NDArray[np.int64], changes: Changes | None = None) -> None:
    """Raise IndexError where the block lacks a row, or a token that is to change."""
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(logits):
        raise IndexError(f"got rows {rows.min()} .. {rows.max()} of a block of {len(logits)}")
    if changes is not None:
        changes.check(logits.vocab)
