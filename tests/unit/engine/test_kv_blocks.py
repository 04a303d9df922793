"""Blocks: who gets which, which are kept for texts that begin alike, which of these go first."""

from __future__ import annotations

import pytest

from specinfer.engine.kv_blocks import BlockPool
from specinfer.errors import IntegrityError

A, B, C = b"A", b"AB", b"ABC"  # hashes of the blocks of one text


def published(pool: BlockPool, *keys: bytes) -> list[int]:
    table: list[int] = []
    assert pool.extend(table, len(keys) * pool.block_size)
    for block, key in zip(table, keys, strict=True):
        pool.publish(block, key)
    return table


def test_a_text_is_found_as_far_as_its_blocks_are_there() -> None:
    pool = BlockPool(6, block_size=4)
    table = published(pool, A, B)
    assert pool.find([A, B, C]) == table
    assert pool.find([A, C]) == table[:1]
    assert pool.find([B]) == table[1:]  # keys hold all that comes before, so this asks for the same text
    assert pool.find([C]) == []


def test_two_owners_share_a_block_until_both_have_gone() -> None:
    pool = BlockPool(3, block_size=4)
    first, second = published(pool, A, B), []
    pool.share(second, pool.find([A]))
    assert second == first[:1]
    pool.check_integrity([first, second])
    pool.release(first)
    assert (pool.num_free, pool.unowned([0, 1])) == (2, 1)  # block 1 is kept, block 2 free, block 0 owned
    pool.release(second)
    assert pool.num_free == 3
    assert pool.find([A, B]) == [0, 1]  # nobody owns them, and they are still there
    pool.check_integrity([])


def test_free_blocks_go_before_kept_ones_and_the_end_of_the_oldest_text_before_its_beginning() -> None:
    pool = BlockPool(6, block_size=4)
    old, new = published(pool, A, B, C), published(pool, b"X", b"XY")
    pool.release(old)  # blocks 0 1 2
    pool.release(new)  # blocks 3 4; block 5 was never used
    table: list[int] = []
    handed_out = []
    for positions in range(4, 25, 4):
        assert pool.extend(table, positions)
        handed_out.append(table[-1])
        pool.check_integrity([table])
    assert handed_out == [5, 2, 1, 0, 4, 3]
    assert pool.find([A]) == []
    assert not pool.extend(table, 25)


def test_a_block_that_is_used_again_is_young_again() -> None:
    pool = BlockPool(2, block_size=4)
    for key in (A, b"X"):
        pool.release(published(pool, key))
    again: list[int] = []
    pool.share(again, pool.find([A]))
    pool.release(again)
    pool.extend(again, 4)
    assert again == [1]
    assert pool.find([A]) == [0]


def test_of_equal_blocks_the_first_is_found_and_the_other_is_freed_when_its_owner_goes() -> None:
    pool = BlockPool(3, block_size=4)
    first, second = published(pool, A), published(pool, A)
    assert pool.find([A]) == first
    pool.release(second)
    pool.check_integrity([first])
    table: list[int] = []
    pool.extend(table, 4)
    assert table == [1]


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param([[0, 1], [2]], id="an owner too many"),
        pytest.param([[0]], id="an owner too few"),
        pytest.param([[0, 1], [0]], id="shared, though its owner counts for one"),
    ],
)
def test_tables_that_disagree_with_the_pool_are_noticed(tables: list[list[int]]) -> None:
    pool = BlockPool(4, block_size=4)
    table: list[int] = []
    pool.extend(table, 8)
    pool.check_integrity([table])
    with pytest.raises(IntegrityError, match="4 blocks, but 2 are free, 0 kept"):
        pool.check_integrity(tables)
