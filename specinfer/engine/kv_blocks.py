"""Who owns which block of the KV cache."""

from __future__ import annotations

import heapq

from specinfer.errors import IntegrityError


class BlockPool:
    """The free blocks of the KV cache; block b is slots b * block_size .. (b + 1) * block_size - 1.

    The lowest free blocks are handed out first, so that a request's blocks tend to lie in a row and can
    be read without a gather.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """How many blocks nobody owns."""
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold `positions` cache positions."""
        return -(-positions // self.block_size)

    def extend(self, block_table: list[int], positions: int) -> bool:
        """Append blocks to `block_table` until it holds `positions`; False, none taken, if they lack."""
        missing = self.blocks_for(positions) - len(block_table)
        if missing > len(self._free):
            return False
        block_table.extend(heapq.heappop(self._free) for _ in range(missing))
        return True

    def release(self, block_table: list[int]) -> None:
        """Take all blocks of `block_table` back and empty it."""
        for block in block_table:
            heapq.heappush(self._free, block)
        block_table.clear()

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Raise IntegrityError unless the free blocks and `block_tables` hold each block exactly once."""
        owned = [block for table in block_tables for block in table]
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{self.num_blocks} blocks, but {len(self._free)} are free and {len(owned)} owned, "
                f"{len(set(owned) & set(self._free))} of them both"
            )
