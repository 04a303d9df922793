"""Parts of a float sum, and the one order of adding them, independent of the number of ranks.

Two adjacent branches of the same number of parts are added if the first starts at a multiple of their total.
The remaining ones are added from right to left. cpu/part_tree.h is the same in native code. For eight parts,
on ranks with 4 + 4 or 2 + 3 + 3 of them:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    |---- rank 0 -----|   |---- rank 1 -----|    one branch each
     |-0--|    |----- 1 ----|  |---- 2 ----|     0 + 1; 2 + 3 and 4; 5 and 6 + 7

A rank adds up complete branches of this tree; adding the branches of all ranks gives the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from specinfer.config import MAX_PARTS

if TYPE_CHECKING:
    from torch import Tensor

_GROUP: Final = 32  # inner elements; parts are cut at multiples of it
_T = TypeVar("_T", int, "Tensor")


@dataclass(frozen=True, slots=True)
class SumParts:
    """The parts of a product's inner elements on one rank, and the parts of other ranks."""

    ends: tuple[int, ...]  # end of each of its parts in its inner elements; the last is their number
    shares: tuple[int, ...]  # [ranks + 1]: the number of each rank's first part, and of all parts
    rank: int = 0

    def check(self, inner: int) -> None:
        """Raise ValueError unless the parts cover `inner` elements in whole groups of 32, except the end."""
        lengths = [behind - end for end, behind in pairwise((0, *self.ends))]
        fits = 0 <= self.rank < self.ranks and len(self.ends) == len(self.numbers)
        if (
            not fits
            or min(lengths, default=0) < 1
            or any(end % _GROUP for end in self.ends[:-1])
            or self.ends[-1] != inner
            or any(behind <= first for first, behind in pairwise(self.shares))
            or not 0 == self.shares[0] < self.shares[-1] <= MAX_PARTS
        ):
            raise ValueError(
                f"got parts that end at {list(self.ends)}, ranks that start at parts {list(self.shares)}; "
                f"rank {self.rank} has {inner} inner elements, cut at groups of {_GROUP} into at most "
                f"{MAX_PARTS} parts in all"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares) - 1

    @property
    def numbers(self) -> range:
        """The numbers of this rank's parts."""
        return range(self.shares[self.rank], self.shares[self.rank + 1])

    def branches(self, rank: int) -> list[int]:
        """The number of parts of each branch that a rank adds up."""
        tree = Branches[int](self.shares[rank])
        for _ in range(self.shares[rank], self.shares[rank + 1]):
            tree.push(0)
        return tree.parts

    @property
    def place(self) -> slice:
        """The place of this rank's branches among those of all ranks."""
        before = sum(len(self.branches(rank)) for rank in range(self.rank))
        return slice(before, before + len(self.branches(self.rank)))

    @property
    def all_branches(self) -> list[int]:
        """The number of parts of each branch of all ranks, in order."""
        return [parts for rank in range(self.ranks) for parts in self.branches(rank)]


class Branches(Generic[_T]):
    """Sums over complete branches of the tree, for parts from number `first` on."""

    def __init__(self, first: int = 0) -> None:
        self.sums: list[_T] = []
        self.parts: list[int] = []  # number of parts of each sum
        self._end = first

    def push(self, added: _T, parts: int = 1) -> None:
        """Append a branch of `parts` parts, and add up what is complete."""
        self._end += parts
        while self.parts and self.parts[-1] == parts and self._end % (2 * parts) == 0:
            added, parts = self.sums.pop() + added, 2 * self.parts.pop()
        self.sums.append(added)
        self.parts.append(parts)

    def total(self) -> _T:
        """The sum of all branches."""
        *others, found = self.sums
        for one in reversed(others):
            found = one + found
        return found
