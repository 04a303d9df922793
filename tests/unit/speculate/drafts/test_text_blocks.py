"""The blocks of texts that are not as long as the target's."""

from __future__ import annotations

import pytest

from specinfer.errors import IntegrityError
from specinfer.speculate.drafts.foreign_draft import TextBlocks


def test_tables_lengthen_while_there_are_blocks_and_are_whole_or_unchanged() -> None:
    blocks, one, other = TextBlocks(4, 8), list[int](), list[int]()
    assert blocks.lengthen(one, 17)
    assert one == [0, 1, 2]
    assert blocks.lengthen(one, 3)  # it has more
    assert not blocks.lengthen(other, 9)
    assert other == []
    assert blocks.lengthen(other, 8)
    blocks.check_integrity([one, other])
    blocks.release(one)
    assert one == []
    assert blocks.lengthen(other, 32)
    blocks.check_integrity([other, one])


def test_a_block_that_two_hold_is_noticed() -> None:
    blocks, one = TextBlocks(2, 8), list[int]()
    blocks.lengthen(one, 9)
    with pytest.raises(IntegrityError):
        blocks.check_integrity([one, [0]])
    with pytest.raises(IntegrityError):
        blocks.check_integrity([])
