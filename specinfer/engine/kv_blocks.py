"""Who owns which block of the KV cache, and which blocks hold text that may be used again."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence

from specinfer.errors import IntegrityError, ensure


class BlockPool:
    """The blocks of the KV cache; block b is slots b * block_size .. (b + 1) * block_size - 1.

    A full block of committed text can be published under the hash of that text and everything before it.
    Requests that begin alike then own it together, and it outlives them until its room is needed:

        free        owned by nobody, holds nothing       handed out first, lowest first, so that a request's
                                                         blocks tend to lie in a row and need no gather
        kept        owned by nobody, published           handed out when no block is free, oldest first
        owned       by one request, or, if published, by several

    Nobody writes to a published block: an owner writes behind the text it found computed, and what it has
    computed itself is published only when the text has gone past it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._owners = [0] * num_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first; of one text, its end first
        self._hashes: dict[int, bytes] = {}  # of published blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many blocks nobody owns."""
        return len(self._free) + len(self._kept)

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold `positions` cache positions."""
        return -(-positions // self.block_size)

    def extend(self, block_table: list[int], positions: int) -> bool:
        """Append blocks to `block_table` until it holds `positions`; False, none taken, if they lack."""
        missing = self.blocks_for(positions) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = heapq.heappop(self._free) if self._free else self._forget_oldest()
            self._owners[block] = 1
            block_table.append(block)
        return True

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The published blocks of the longest beginning of a text whose blocks have `hashes`."""
        found: list[int] = []
        for key in hashes:
            block = self._published.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unowned(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody owns: those that `num_free` counts."""
        return sum(block in self._kept for block in blocks)

    def any_published(self, blocks: Sequence[int]) -> bool:
        """Whether one of `blocks` can be found by others, so that nobody may write to it."""
        return any(block in self._hashes for block in blocks)

    def share(self, block_table: list[int], blocks: Sequence[int]) -> None:
        """Make the owner of an empty `block_table` an owner of published `blocks`, too."""
        ensure(not block_table, "a text is found at its beginning")
        for block in blocks:
            self._owners[block] += 1
            self._kept.pop(block, None)
        block_table.extend(blocks)

    def publish(self, block: int, key: bytes) -> None:
        """Let others find an owned, full block of computed text; of equal blocks the first is found."""
        ensure(self._owners[block] > 0, f"block {block} has no owner")
        if key not in self._published and block not in self._hashes:
            self._published[key] = block
            self._hashes[block] = key

    def release(self, block_table: list[int]) -> None:
        """Give all blocks of `block_table` back and empty it; published ones are kept for others."""
        for block in reversed(block_table):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._hashes:
                    self._kept[block] = None
                else:
                    heapq.heappush(self._free, block)
        block_table.clear()

    def _forget_oldest(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._published[self._hashes.pop(block)]
        return block

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Raise IntegrityError unless every block is free, kept, or in as many tables as it has owners."""
        owned = Counter(block for table in block_tables for block in table)
        unowned = Counter(self._free) + Counter(self._kept.keys())
        if any(owned[b] != self._owners[b] for b in range(self.num_blocks)) or any(
            unowned[b] != (self._owners[b] == 0) for b in range(self.num_blocks)
        ):
            raise IntegrityError(
                f"{self.num_blocks} blocks, but {len(self._free)} are free, {len(self._kept)} kept and "
                f"{len(owned)} in tables, {len(set(owned) & set(unowned))} of them both"
            )
        shared = {block for block, tables in owned.items() if tables > 1}
        if not (shared | set(self._kept)) <= set(self._hashes) or self._published != {
            key: block for block, key in self._hashes.items()
        }:
            raise IntegrityError("blocks that are kept or shared, and published ones, disagree")
