"""Which rows of a pass become text, and what is kept of them until a head reads it."""

from __future__ import annotations

from specinfer.runtime.features import text_rows
from specinfer.tree import TokenTree
from tests import plans


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
    found = text_rows(plan, trees, [(2, 4), None, ()])
    # Rows of the pass: 0-3 the chunk, 4-8 a tree, 9-13 another, 14-16 the end of a prompt.
    names = [entry.request.request_id for entry in found.entries]
    assert dict(zip(names, found.rows, strict=True)) == {
        "chunk": [0, 1, 2, 3],
        "tree": [4, 6, 8],
        "whole": [14, 15, 16],
    }
    few = found.where(lambda entry: entry.request.request_id != "tree")
    assert few.rows == [[0, 1, 2, 3], [14, 15, 16]]
