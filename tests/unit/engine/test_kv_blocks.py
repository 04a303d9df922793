"""KV blocks: assignment, caching of shared prefixes, eviction order, and the block most like a text."""

from __future__ import annotations

import time

import pytest

from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.prefix_index import PrefixIndex
from specinfer.errors import IntegrityError

A, B, C = b"A", b"AB", b"ABC"  # hashes of the blocks of one text


def published(pool: BlockPool, *keys: bytes) -> list[int]:
    table: list[int] = []
    assert pool.extend(table, len(keys) * pool.block_size)
    for block, key in zip(table, keys, strict=True):
        pool.publish(block, key, key[:-1], key[-1:])
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
    assert pool.find([A, B]) == [0, 1]  # they have no owner, but are still cached
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


def test_pinned_blocks_go_last_until_their_time_is_over_and_are_half_of_the_pool_at_most() -> None:
    for seconds, expected in ((60, [0, 3, 1, 2]), (-1, [0, 1, 2, 3])):
        pool = BlockPool(4, block_size=4)
        for key in (A, b"X", b"Y", b"Z"):
            pool.release(published(pool, key))
        for block in (0, 1, 2):  # the first pin ends with the third
            pool.pin(block, time.monotonic() + seconds)
        table: list[int] = []
        assert pool.extend(table, 16)
        assert table == expected
        pool.check_integrity([table])


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


def test_what_was_freed_last_is_handed_out_first_and_in_the_same_order() -> None:
    pool = BlockPool(9, block_size=4)
    tables: list[list[int]] = [[], []]
    for table in tables:
        assert pool.extend(table, 12)
    for table in tables:
        pool.release(table)
    again: list[int] = []
    assert pool.extend(again, 28)
    assert again == [3, 4, 5, 0, 1, 2, 6]


def unrelated(number: int, blocks: int) -> str:
    """A text that begins as no other does."""
    return chr(1000 + number) + "-" * (blocks - 1)


def answered(pool: BlockPool, text: str, touched: set[int] | None = None) -> int:
    """A request with a block for every letter of `text` comes and goes; returns how many were there.

    Its blocks are added to `touched`.
    """
    hashes = [text[: end + 1].encode() for end in range(len(text))]
    table: list[int] = []
    found = pool.find(hashes)
    pool.share(table, found)
    assert pool.extend(table, len(text) * pool.block_size)
    for block, key in zip(table[len(found) :], hashes[len(found) :], strict=True):
        pool.publish(block, key, key[:-1], key[-1:])
    if touched is not None:
        touched.update(table)
    pool.release(table)
    pool.check_integrity([])
    return len(found)


def test_texts_are_found_again_while_prompt_memory_holds_them() -> None:
    pool = BlockPool(1000, block_size=4, max_kept=120)
    users = [chr(ord("A") + number) + "says this" for number in range(50)]
    touched: set[int] = set()
    for text in users[:12]:
        assert answered(pool, text, touched) == 0
    assert [answered(pool, text, touched) for text in users[:12]] == [10] * 12
    for text in users:
        answered(pool, text, touched)
    assert len(touched) <= 120 + 10, "of one request beside the kept ones"
    assert answered(pool, users[-1]) == 10
    assert answered(pool, users[20]) == 0, "the oldest were evicted"


def test_without_prompt_memory_blocks_stay_until_the_next_request() -> None:
    pool, touched = BlockPool(1000, block_size=4, max_kept=0), set[int]()
    for number in range(20):
        answered(pool, unrelated(number, 10), touched)
    assert touched == set(range(10))
    assert answered(pool, unrelated(19, 10)) == 10


def test_tables_that_disagree_with_the_pool_are_noticed() -> None:
    pool, table = BlockPool(4, block_size=4), list[int]()
    pool.extend(table, 8)
    pool.check_integrity([table])
    # An owner too many, one too few, and a shared block whose owner counts for one.
    for tables in ([[0, 1], [2]], [[0]], [[0, 1], [0]]):
        with pytest.raises(IntegrityError, match="4 blocks, but 2 are free, 0 kept"):
            pool.check_integrity(tables)


def test_the_block_that_begins_most_like_a_text_is_found_until_it_is_dropped() -> None:
    index = PrefixIndex()
    for block, before, tokens in ((0, b"", [1, 2, 3, 4]), (1, b"", [1, 2, 5]), (2, b"a", [9, 9, 9, 9])):
        index.add(block, before, tokens)
    for before, tokens, expected in (
        (b"", [1, 2, 3, 9], (0, 3)),
        (b"", [1, 2, 5, 6, 7], (1, 3)),
        (b"", [1, 2], (1, 2)),  # the newest of those that are alike
        (b"", [8], (1, 0)),
        (b"a", [9, 9], (2, 2)),
        (b"b", [9, 9], None),
    ):
        found = index.nearest(before, tokens)
        assert (found and (found.block, found.alike)) == expected, tokens
    index.drop(1)
    index.drop(1)
    assert index.blocks == {0, 2}
    found = index.nearest(b"", [1, 2, 5])
    assert (found.block, found.alike) == (0, 2)
