"""Small dense matrices, enough for the geometry code and its tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Matrix:
    """An immutable matrix of floats."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        if not rows or not rows[0]:
            raise ValueError("a matrix needs at least one row and one column")
        if len({len(row) for row in rows}) != 1:
            raise ValueError("the rows differ in length")
        self._rows = tuple(tuple(float(value) for value in row) for row in rows)

    @classmethod
    def identity(cls, size: int) -> Matrix:
        return cls([[1.0 if i == j else 0.0 for j in range(size)] for i in range(size)])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._rows), len(self._rows[0])

    def __getitem__(self, index: tuple[int, int]) -> float:
        row, column = index
        return self._rows[row][column]

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Matrix) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self._rows)

    def __add__(self, other: Matrix) -> Matrix:
        if self.shape != other.shape:
            raise ValueError(f"cannot add {other.shape} to {self.shape}")
        pairs = zip(self._rows, other._rows, strict=True)
        return Matrix([[a + b for a, b in zip(x, y, strict=True)] for x, y in pairs])

    def __mul__(self, factor: float) -> Matrix:
        return Matrix([[value * factor for value in row] for row in self._rows])

    def __matmul__(self, other: Matrix) -> Matrix:
        if self.shape[1] != other.shape[0]:
            raise ValueError(f"cannot multiply {self.shape} by {other.shape}")
        columns = list(zip(*other._rows, strict=True))
        return Matrix([[_dot(row, column) for column in columns] for row in self._rows])

    def trace(self) -> float:
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"no trace: the shape is {self.shape}")
        return sum(self._rows[i][i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        return f"Matrix({[list(row) for row in self._rows]})"


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
