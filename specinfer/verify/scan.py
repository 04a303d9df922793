"""Blocks of logit rows, and scans over many rows: the likeliest tokens and the target's choices.

A pass yields a block of rows, and a step needs only a few numbers of most rows. So one call scans them in
place: the native scan (kernels/sampling.py) on all threads, the scan here row by row.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Self

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
# Sampling parameters of one row. cpu/sampling.h has the same fields.
SAMPLE_REQUEST: Final = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("position", np.int64),  # absolute position of the token to choose
    ]
)
SampleRequest = tuple[float, int, float, float, int, int]  # the fields of an entry with dtype SAMPLE_REQUEST
NO_TOKEN: Final = -1
_MAX_TOP_K: Final = 2**62  # keeps every token


class LogitBlock:
    """Logits, [R, V], of float32 or bfloat16; a row is converted to float32 when it is read.

    Verification reads few rows, and a row of a large vocabulary has half a megabyte. Scans of many rows read
    them in place.
    """

    __slots__ = ("_count", "_rows_RV", "_view", "address", "dtype", "stride", "vocab")

    def __init__(self, rows_RV: _Rows) -> None:
        """Hold `rows_RV`, of float32, or of uint16 with the bits of bfloat16, which NumPy lacks.

        Raises TypeError for another dtype or shape, and for rows that are not contiguous.
        """
        kind, size = _TYPES.get(rows_RV.dtype), rows_RV.itemsize
        if kind is None or rows_RV.ndim != 2 or (rows_RV.shape[1] > 1 and rows_RV.strides[1] != size):
            raise TypeError(
                "logits must be [R, V] of float32, or of uint16 as bits of bfloat16, each row in one piece; "
                f"got {rows_RV.dtype} {list(rows_RV.shape)}, {rows_RV.strides} bytes apart"
            )
        self._rows_RV: _Rows | None = rows_RV
        self._view: Callable[[], _Rows] = lambda: rows_RV
        self._count = len(rows_RV)
        self.dtype: LogitType = kind
        self.vocab: int = rows_RV.shape[1]
        self.address: int = rows_RV.ctypes.data
        self.stride = rows_RV.strides[0] // size  # elements between the starts of rows

    @classmethod
    def from_address(
        cls,
        address: int,
        dtype: LogitType,
        shape: tuple[int, int],
        view: Callable[[], _Rows],
    ) -> Self:
        """Return a block of contiguous rows, [R, V], at `address`; `view` returns them as an array.

        Native scans read the address; `view` must keep the memory alive.
        """
        block = cls.__new__(cls)
        block._rows_RV, block._view = None, view
        block._count, block.vocab = shape
        block.address, block.dtype, block.stride = address, dtype, block.vocab
        return block

    @property
    def rows_RV(self) -> _Rows:
        """All rows, of float32, or of uint16 with the bits of bfloat16."""
        if self._rows_RV is None:
            self._rows_RV = self._view()
        return self._rows_RV

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

    ids: NDArray[np.int64]  # [R, n]: likeliest first, ties by lowest id; NO_TOKEN after the last
    values: NDArray[np.float32]  # [R, n]: their logits; -inf after the last
    found: NDArray[np.int64]  # [R]: number of tokens found
    masses: NDArray[np.float64]  # [R]: `RowScan.mass` relative to the largest logit; NaN if none is found


class Scan(RowScan):
    """Scans of logits in NumPy, row by row; kernels/sampling.py has the native scan. Never mutates logits.

    Rows are int64 numbers in the block, in any order, with repetitions. A row whose largest logit is not
    finite (NaN, +inf, or all -inf) has no tokens. Raises IndexError for a row that the block does not have.
    """

    __slots__ = ()

    def likeliest(
        self, logits: LogitBlock, rows: NDArray[np.int64], n: int, temperatures: NDArray[np.float64]
    ) -> Likeliest:
        """Return the n >= 1 likeliest tokens of each row, and its mass at the row's temperature, above 0."""
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
        requests: NDArray[np.void],
        changes: Changes | None = None,
    ) -> NDArray[np.int64]:
        """Return the target's choice in each row, [R], as `choice` does; NO_TOKEN for a row without tokens.

        `requests` are of dtype SAMPLE_REQUEST, [R]. `changes` apply to copies of the rows. Raises IndexError
        if they change a token outside the vocabulary.
        """
        check_rows(logits, rows, changes)
        chosen = [
            choice(changed_row(logits, row, changes, place), one, self)
            for place, (row, one) in enumerate(zip(rows.tolist(), requests, strict=True))
        ]
        return np.array(chosen, dtype=np.int64)

    def chosen(self, logits: LogitBlock, rows: Sequence[int], requests: Sequence[SampleRequest]) -> list[int]:
        """Return `choices` for lists of few rows, for which making arrays takes longer than reading them."""
        numbers = np.array(rows, dtype=np.int64)
        ids: list[int] = self.choices(logits, numbers, np.array(requests, dtype=SAMPLE_REQUEST)).tolist()
        return ids


NUMPY: Final = Scan()


def sample_request(params: SamplingParams, seed: int, position: int) -> SampleRequest:
    """Return the sampling request for the token at an absolute position."""
    top_k = min(params.top_k, _MAX_TOP_K)
    return params.temperature, top_k, params.top_p, params.min_p, seed, position


def choice(logits_V: NDArray[np.float32], one: np.void, scan: RowScan) -> int:
    """Return the target's choice in one row, for one sampling request; NO_TOKEN if there is none."""
    temperature, top_k, top_p, min_p, seed, position = one.item()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    try:
        law = target_law(logits_V, params, scan)
    except LogitsError:
        return NO_TOKEN
    return coupled_choice(law, seed, position, scan)


def changed_row(logits: LogitBlock, row: int, changes: Changes | None, place: int) -> NDArray[np.float32]:
    """Return a row after the changes at index `place`, [vocab]; the caller may not write to it."""
    if changes is None or not len((own := changes.row(place)).ids):
        return logits[row]
    changed = np.empty(logits.vocab, dtype=np.float32)
    logits.copy(row, changed)
    own.apply(changed)
    return changed


def no_likeliest(rows: int, n: int) -> Likeliest:
    """Return empty results for `rows` rows and n tokens."""
    return Likeliest(
        np.full((rows, n), NO_TOKEN, dtype=np.int64),
        np.full((rows, n), -np.inf, dtype=np.float32),
        np.zeros(rows, dtype=np.int64),
        np.full(rows, np.nan),
    )


def check_rows(logits: LogitBlock, rows: NDArray[np.int64], changes: Changes | None = None) -> None:
    """Raise IndexError for a row outside the block, or a changed token outside the vocabulary."""
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(logits):
        raise IndexError(f"got rows {rows.min()} .. {rows.max()} of a block of {len(logits)}")
    if changes is not None:
        changes.check(logits.vocab)
