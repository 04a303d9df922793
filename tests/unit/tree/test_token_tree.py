"""Trees as literals a person can check: paths, building under a budget, merging, expansion plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.errors import ConfigError, IntegrityError
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder, merge
from specinfer.tree.token_tree import Expansion, draws_by_parent, single_node

#      4
#     / \
#    5   7
#    |  / \
#    6 8   9
TREE = TokenTree(token_ids=(4, 5, 7, 6, 8, 9), parents=(-1, 0, 0, 1, 2, 2))


def sequences(tree: TokenTree) -> set[tuple[int, ...]]:
    """The token sequences a tree holds, one per node (definition 3.1)."""
    return {tree.path_tokens(node) for node in range(tree.num_nodes)}


def draws(tree: TokenTree) -> list[tuple[str, tuple[int, ...]]]:
    """Every draw, in order, as who proposed which sequence."""
    return [(d.speculator, tree.path_tokens(d.node)) for d in tree.draws]


def grown(root: int, guesses: Sequence[Sequence[int]], speculator: str = "s") -> TokenTree:
    """The tree of these sequences below `root`, one draw per token of each."""
    builder = TreeBuilder(root)
    for guess in guesses:
        node = 0
        for token in guess:
            node = builder.add(node, token, speculator)
    return builder.build()


def test_depths_children_and_paths() -> None:
    TREE.check_integrity()
    assert TREE.num_nodes == 6
    assert TREE.depths() == [0, 1, 1, 2, 2, 2]
    assert TREE.children() == [{5: 1, 7: 2}, {6: 3}, {8: 4, 9: 5}, {}, {}, {}]
    assert [TREE.path_to(node) for node in range(6)] == [(), (1,), (2,), (1, 3), (2, 4), (2, 5)]
    assert TREE.path_tokens(5) == (7, 9)


def test_a_single_node_is_ordinary_decoding() -> None:
    tree = single_node(3)
    tree.check_integrity()
    assert tree == TokenTree((3,), (-1,), ())
    assert tree.children() == [{}]


def test_a_broken_tree_is_called_one() -> None:
    for tree, complaint in (
        (TokenTree((), ()), "has a root"),
        (TokenTree((1, 2), (-1,)), "one parent per node"),
        (TokenTree((1,), (0,)), "node 0 is the root"),
        (TokenTree((1, 2, 3), (-1, 2, 0)), "node 1 comes before its parent 2"),
        (TokenTree((1, 2, 2), (-1, 0, 0)), "node 2 repeats a sibling"),
        (TokenTree((1, 2), (-1, 0), (Draw(0, 0, "s", DrawRule.POINT_MASS),)), "names no node"),
        (TokenTree((1, 2, 3), (-1, 0, 1), (Draw(0, 2, "s", DrawRule.POINT_MASS),)), "has another parent"),
    ):
        with pytest.raises(IntegrityError, match=complaint):
            pytest.fail(f"{tree}: {tree.check_integrity()}")


def test_a_builder_shares_nodes_and_keeps_every_draw() -> None:
    law = np.array([0.5, 0.5])
    builder = TreeBuilder(root=9)
    assert builder.add(0, 1, "a", DrawRule.IID, law) == 1
    assert builder.add(0, 1, "a", DrawRule.IID, law) == 1
    assert builder.add(1, 0, "b") == 2
    tree = builder.build()
    tree.check_integrity()
    assert (tree.token_ids, tree.parents) == ((9, 1, 0), (-1, 0, 1))
    assert [(d.parent, d.node, d.speculator, d.rule) for d in tree.draws] == [
        (0, 1, "a", DrawRule.IID),
        (0, 1, "a", DrawRule.IID),
        (1, 2, "b", DrawRule.POINT_MASS),
    ]
    assert tree.draws[0].law is law
    assert tree.draws[2].law is None
    assert tree.depths() == [0, 1, 2]
    assert (builder.child(0, 1), builder.child(0, 2)) == (1, None)


def test_a_draw_equals_itself_alone() -> None:
    one, other = (Draw(0, 1, "s", DrawRule.IID, np.array([0.5, 0.5])) for _ in range(2))
    assert [one, other].index(other) == 1
    assert one != other
    assert len({one, other, one}) == 2


def test_a_full_builder_takes_no_new_node_and_still_takes_draws() -> None:
    builder = TreeBuilder(root=0, max_nodes=2)
    assert not builder.full
    assert builder.add(0, 5, "a") == 1
    assert builder.full
    assert builder.add(0, 6, "a") is None  # no room
    assert builder.add(0, 5, "b") == 1  # there already
    assert draws(builder.build()) == [("a", (5,)), ("b", (5,))]


def test_a_full_builder_never_drops_a_sampled_draw() -> None:
    # Dropping it because its token is new would make "is there a draw" depend on the value drawn.
    builder = TreeBuilder(root=0, max_nodes=1)
    with pytest.raises(IntegrityError, match="a sampled draw may not be dropped"):
        builder.add(0, 6, "a", DrawRule.IID, np.array([1.0]))


def test_merging_shares_nodes_and_keeps_draws_in_order() -> None:
    #     1          1              1
    #    / \   and   |     make    / \
    #   2   3        2            2   3
    #   |           / \          / \
    #   4          5   4        4   5
    first = grown(1, [(2, 4), (3,)], "first")
    second = grown(1, [(2, 5), (2, 4)], "second")
    merged = merge([first, second])
    merged.check_integrity()
    assert merged.token_ids == (1, 2, 4, 3, 5)
    assert merged.parents == (-1, 0, 1, 0, 1)
    assert draws(merged) == [
        *(("first", (2,)), ("first", (2, 4)), ("first", (3,)), ("second", (2,)), ("second", (2, 5))),
        *(("second", (2,)), ("second", (2, 4))),
    ]
    below = draws_by_parent(merged.draws)
    assert [(d.speculator, d.node) for d in below[0]] == [
        *(("first", 1), ("first", 3), ("second", 1), ("second", 1))
    ]
    assert [(d.speculator, d.node) for d in below[1]] == [("first", 2), ("second", 4), ("second", 2)]


def test_merging_keeps_the_law_of_each_draw() -> None:
    laws = [np.array([0.25, 0.75]), np.array([0.5, 0.5])]
    trees = []
    for law in laws:
        builder = TreeBuilder(root=0)
        builder.add(0, 1, "s", DrawRule.IID, law)
        trees.append(builder.build())
    merged = merge(trees)
    assert merged.num_nodes == 2
    assert [d.law for d in merged.draws] == laws


def test_trees_with_different_roots_do_not_merge() -> None:
    with pytest.raises(IntegrityError, match=r"^trees to merge must share one root token, got \[1, 2\]$"):
        merge([single_node(1), single_node(2)])


GUESSES = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5)


@given(st.lists(GUESSES, min_size=1, max_size=4))
def test_a_merged_tree_holds_the_union_of_the_sequences(many: list[list[list[int]]]) -> None:
    """Definition 3.2: the sequences of the merged tree are those of its parts, no more, no fewer."""
    trees = [grown(7, guesses, f"s{i}") for i, guesses in enumerate(many)]
    merged = merge(trees)
    merged.check_integrity()
    assert sequences(merged) == set().union(*map(sequences, trees))
    assert merged.num_nodes == len(sequences(merged)), "no two nodes stand for one sequence"
    assert draws(merged) == [draw for tree in trees for draw in draws(tree)]


def test_a_node_is_as_likely_as_its_path() -> None:
    builder = TreeBuilder(root=4)
    first = builder.add(0, 5, "a", confidence=0.2)
    builder.add(0, 5, "b", confidence=0.5)  # the highest confidence is kept
    builder.add(first, 6, "a", confidence=0.5)
    builder.add(0, 7, "a", confidence=0.25)
    assert builder.build().likelihoods() == [1.0, 0.5, 0.25, 0.25]
    assert single_node(4).likelihoods() == [1.0]


TEXTS = ("", "a", "1,,2", "1;2", "1.5", "1,x")
WIDTHS = ((), (0,), (1, -2), (65,), (1,) * 65, (True,), (1.0,))


def test_a_plan_is_read() -> None:
    for text, widths, num_nodes in (
        ("1", (1,), 2),
        ("1,1,3,1,1", (1, 1, 3, 1, 1), 1 + 1 + 1 + 3 + 3 + 3),
        ("2,2,1", (2, 2, 1), 1 + 2 + 4 + 4),
        (" <1, 2> ", (1, 2), 1 + 1 + 2),
    ):
        plan = Expansion.parse(text)
        assert plan.widths == widths, text
        assert plan.depth == len(widths), text
        assert plan.num_nodes == num_nodes, text
        assert Expansion.parse(str(plan)) == plan, text


def test_text_that_is_no_plan_and_widths_out_of_range_are_refused() -> None:
    for make, wrong, text, allowed in (
        *((Expansion.parse, one, one, "integers >= 1 with commas between") for one in TEXTS),
        *((Expansion, one, ",".join(map(str, one)), "1 to 64 integers from 1 to 64") for one in WIDTHS),
    ):
        with pytest.raises(ConfigError) as refused:
            make(wrong)
        assert str(refused.value) == f"expansion is {text!r}; allowed: {allowed}, for example 1,1,3,1,1"
