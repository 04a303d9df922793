"""A token tree on the terminal."""

from __future__ import annotations

import click

from specinfer.cli.tree_view import draw_tree
from specinfer.engine.steps import TreeEvent
from specinfer.tree import TreeBuilder
from specinfer.tree.token_tree import single_node
from specinfer.verify.coupled import Acceptance

WORDS = [" the", " cat", " dog", " sat", ' "ran"\n', " on", " mat"]

DRAWING = r"""
step 3: 2 of 4 accepted
" the"
|-- " cat" (draft, lookup) *
|   |-- " sat" (draft) *
|   |   `=> " on"
|   `-- " \"ran\"\n" (draft)
`-- " dog" (draft)
"""


def event() -> TreeEvent:
    builder = TreeBuilder(root=0)
    cat = builder.add(0, 1, "draft") or 0
    builder.add(0, 2, "draft")
    builder.add(cat, 3, "draft")
    builder.add(cat, 4, "draft")
    builder.add(0, 1, "lookup")
    return TreeEvent(3, "r", builder.build(), Acceptance((1, 3), 5))


def test_a_tree_shows_speculators_and_accepted_nodes() -> None:
    lines = draw_tree(event(), WORDS.__getitem__)
    assert list(map(click.unstyle, lines)) == DRAWING.strip().splitlines()


def test_ordinary_decoding_is_a_tree_of_one_node() -> None:
    lines = draw_tree(TreeEvent(1, "r", single_node(0), Acceptance((), 6)), WORDS.__getitem__)
    assert list(map(click.unstyle, lines)) == ["step 1: no guesses", '" the"', '`=> " mat"']
