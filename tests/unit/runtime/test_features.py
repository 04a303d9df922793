"""Which rows of a pass become text, and what is kept of them until a head reads it."""

from __future__ import annotations

import torch

from specinfer.runtime.batch import step_rows
from specinfer.runtime.features import UnreadFeatures, text_rows
from specinfer.tree import TokenTree
from tests import plans


def rows_of(first: int, count: int) -> torch.Tensor:
    """Hidden states that tell their position: [count, 1, 1]."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None, None]


def test_rows_of_prompts_roots_and_accepted_paths_become_text() -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    tree = TokenTree((7, 20, 21, 22, 23), (-1, 0, 0, 2, 2))
    plan = plans.plan(
        plans.entry(text, request_id="chunk", start=0, end=4, max_nodes=0),
        plans.entry(text, request_id="tree", start=6, end=7),
        plans.entry(text, request_id="ends", start=6, end=7),
        plans.entry(text, request_id="whole", start=4, end=7, max_nodes=1),
    )
    trees = [tree, tree, TokenTree((7,), (-1,))]
    rows = step_rows(plan, trees).rows
    found = text_rows(plan, rows, [(2, 4), None, ()])
    # Rows of the pass: 0-3 the chunk, 4-8 a tree, 9-13 another, 14-16 the end of a prompt.
    names = [entry.request.request_id for entry in found.entries]
    assert dict(zip(names, found.rows, strict=True)) == {
        "chunk": [0, 1, 2, 3],
        "tree": [4, 6, 8],
        "whole": [14, 15, 16],
    }
    few = found.of_those(lambda entry: entry.request.request_id != "tree")
    assert few.rows == [[0, 1, 2, 3], [14, 15, 16]]


def test_features_are_taken_in_order_whatever_they_came_in() -> None:
    unread = UnreadFeatures(3)
    for first, count in [(3, 2), (5, 1), (6, 4)]:
        unread.add(rows_of(first, count))
    assert (unread.first, unread.end) == (3, 10)
    assert unread.take(1).flatten().tolist() == [3]
    assert unread.take(4).flatten().tolist() == [4, 5, 6, 7]
    assert (unread.first, unread.end) == (8, 10)
    unread.drop_before(9)
    assert unread.take(1).flatten().tolist() == [9]
    unread.drop_before(16)
    assert (unread.first, unread.end) == (16, 16)
