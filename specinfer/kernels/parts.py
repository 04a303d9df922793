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
from typing import Final

from specinfer.config import MAX_PARTS

_GROUP: Final = 32  # inner elements; parts are cut at multiples of it


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
        found: list[int] = []
        for end in range(self.shares[rank] + 1, self.shares[rank + 1] + 1):
            parts = 1
            while found and found[-1] == parts and end % (2 * parts) == 0:
                parts += found.pop()
            found.append(parts)
        return found

    @property
    def place(self) -> slice:
        """The place of this rank's branches among those of all ranks."""
        before = sum(len(self.branches(rank)) for rank in range(self.rank))
        return slice(before, before + len(self.branches(self.rank)))

    @property
    def all_branches(self) -> list[int]:
        """The number of parts of each branch of all ranks, in order."""
        return [parts for rank in range(self.ranks) for parts in self.branches(rank)]
