"""PrefixIndex: the block that begins most like a text."""

from __future__ import annotations

from specinfer.engine.prefix_index import PrefixIndex


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
    assert found is not None
    assert (found.block, found.alike) == (0, 2)
