"""TextBlocks: the blocks of a draft's cache, where its texts are not as long as the target's.

A draft whose tokens are the target's writes to the blocks that the scheduler gave the request. One with
tokens of its own cannot: it has tables of its own over as many blocks. Where they are short somebody's text
is read again later, which costs guesses, never the text.
"""

from __future__ import annotations

from specinfer.errors import ensure


class TextBlocks:
    """Which blocks are free; tables are the texts' own, and only lengthened and emptied here."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    def lengthen(self, table: list[int], positions: int) -> bool:
        """Let a table hold so many positions; False, and nothing is changed, where blocks are short."""
        missing = -(-positions // self._block_size) - len(table)
        if missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, table: list[int]) -> None:
        """Take a table's blocks back; it is empty then."""
        self._free.extend(reversed(table))
        table.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise IntegrityError unless every block is free or in one of these tables, once."""
        held = [block for table in tables for block in table]
        ensure(
            sorted([*held, *self._free]) == list(range(self._num_blocks)),
            "every block of a draft's cache is free or one text's",
        )
