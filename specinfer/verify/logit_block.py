"""Rows of logits in host memory, as a model left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

LogitType = Literal["float32", "bfloat16"]
_Rows = NDArray[np.float32] | NDArray[np.uint16]
_TYPES: Final[dict[np.dtype[np.generic], LogitType]] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.uint16): "bfloat16",
}


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
