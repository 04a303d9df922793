"""Rotations of positions 0, 1, ... that native calls look up (cpu/layers.h), more of them as texts grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from specinfer.attention.backend import Rotation
from specinfer.kernels.library import RotationsArgs

# Makes rotations of so many positions, or more, for each table: float32 [positions, H / 2], contiguous.
MakeRotations = Callable[[int], Sequence[Rotation]]


class RotationTables:
    """The tables that a native call is told of, which grow in place.

    Several threads may grow them and call meanwhile: longer tables leave the shorter ones, which they begin
    with, to whoever reads them.
    """

    __slots__ = ("_grows", "_kept", "_make", "_told")

    def __init__(self, told: Sequence[RotationsArgs], make: MakeRotations) -> None:
        """`told` are parts of what calls are given, and written to.

        `make` must not lead back to who owns this, or weights would outlive their last user.
        """
        self._told = told
        self._make = make
        self._kept: list[Rotation] = []  # whose memory is told of
        self._grows = Lock()

    def reach(self, positions: int) -> None:
        """Have rotations of so many positions at the least."""
        if self._reaches(positions):
            return
        with self._grows:
            if self._reaches(positions):  # another thread has made them meanwhile
                return
            made = self._make(positions)
            self._kept += made
            for told, one in zip(self._told, made, strict=True):
                told.cos, told.sin = one.cos.data_ptr(), one.sin.data_ptr()
                told.positions = len(one.cos)  # last: who reads it has a table for all of them

    def _reaches(self, positions: int) -> bool:
        return all(told.positions >= positions for told in self._told)
