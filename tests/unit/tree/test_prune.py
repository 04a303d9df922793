"""Pruning, on trees a person can check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.merging import likeliest, pinned_nodes, prune

#      4
#     / \
#    5   7
#    |  / \
#    6 8   9
#      |
#      3
SEQUENCES = [(5, 6), (7, 8, 3), (7, 9)]


def tree(rule: DrawRule = DrawRule.POINT_MASS) -> TokenTree:
    builder = TreeBuilder(root=4)
    law = np.full(10, 0.1) if rule in (DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT) else None
    for sequence in SEQUENCES:
        node: int | None = 0
        for token in sequence:
            assert node is not None
            node = builder.add(node, token, "s", rule, law)
    return builder.build()


def paths(pruned: TokenTree) -> set[tuple[int, ...]]:
    pruned.check_integrity()
    return {pruned.path_tokens(node) for node in range(1, pruned.num_nodes)}


ALL = {(5,), (5, 6), (7,), (7, 8), (7, 8, 3), (7, 9)}


@pytest.mark.parametrize("rule", [DrawRule.POINT_MASS, DrawRule.COUPLED])
@pytest.mark.parametrize(
    ("permits", "left"),
    [
        (lambda path, token: token != 7, {(5,), (5, 6)}),  # its descendants are dropped, too
        (lambda path, token: (path, token) != ((7,), 8), ALL - {(7, 8), (7, 8, 3)}),
        (lambda path, token: (path, token) != ((5,), 8), ALL),  # the same token behind another path
    ],
)
def test_forbidden_tokens_go_with_what_hangs_below(
    rule: DrawRule, permits: Callable[[tuple[int, ...], int], bool], left: set[tuple[int, ...]]
) -> None:
    pruned = prune(tree(rule), permits=permits, ending=())
    assert paths(pruned) == left
    assert {pruned.path_tokens(draw.node) for draw in pruned.draws} == left
    assert pruned.token_ids[0] == 4


@pytest.mark.parametrize("rule", [DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT])
def test_a_sampled_draw_is_never_dropped_for_its_value(rule: DrawRule) -> None:
    sampled = tree(rule)
    assert prune(sampled, permits=lambda path, token: False, ending=()) is sampled
    # Below an ending token there is no law left to keep.
    assert paths(prune(sampled, permits=lambda path, token: False, ending={7})) == {(5,), (5, 6), (7,)}


def test_a_node_stays_for_one_sampled_draw_among_its_draws() -> None:
    builder = TreeBuilder(root=4)
    builder.add(0, 5, "a")
    builder.add(0, 5, "b", DrawRule.IID, np.full(10, 0.1))
    builder.add(0, 6, "a")
    pruned = prune(builder.build(), permits=lambda path, token: False, ending=())
    assert paths(pruned) == {(5,)}
    assert [(d.speculator, d.rule) for d in pruned.draws] == [("a", "point_mass"), ("b", "iid")]


def test_a_tree_that_loses_nothing_is_returned_itself() -> None:
    whole = tree()
    assert prune(whole, permits=None, ending={1}) is whole
    assert prune(whole, permits=lambda path, token: True, ending={9}) is whole


@given(
    guesses=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8),
    banned=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3))),
    ending=st.sets(st.integers(0, 3)),
)
def test_what_stays_is_what_can_be_text(
    guesses: list[list[int]], banned: set[tuple[int, int]], ending: set[int]
) -> None:
    builder = TreeBuilder(root=0)
    for guess in guesses:
        node: int | None = 0
        for token in guess:
            assert node is not None
            node = builder.add(node, token, "s")

    def can_be(path: tuple[int, ...]) -> bool:
        return not any((i, t) in banned for i, t in enumerate(path)) and ending.isdisjoint(path[:-1])

    whole = builder.build()
    pruned = prune(whole, permits=lambda path, token: (len(path), token) not in banned, ending=ending)
    assert paths(pruned) == {path for path in paths(whole) if can_be(path)}
    kept = [
        (whole.path_tokens(d.node), d.speculator) for d in whole.draws if can_be(whole.path_tokens(d.node))
    ]
    assert [(pruned.path_tokens(d.node), d.speculator) for d in pruned.draws] == kept


POINT, IID = DrawRule.POINT_MASS, DrawRule.IID


def grown(*draws: tuple[int, int, DrawRule], confidence: Sequence[float] = ()) -> TokenTree:
    """The tree of these draws: parent, token, rule."""
    builder = TreeBuilder(root=4)
    for i, (parent, token, rule) in enumerate(draws):
        law = np.full(10, 0.1) if rule is IID else None
        builder.add(parent, token, "s", rule, law, confidence[i] if confidence else 0.5)
    return builder.build()


def test_what_follows_all_samples_below_its_node_may_go() -> None:
    for draws, pinned in (
        ([(0, 5, IID), (0, 7, POINT), (1, 6, POINT)], {1}),
        ([(0, 5, POINT), (0, 7, IID)], {1, 2}),  # 7 was drawn without knowing what becomes of 5
        ([(0, 5, POINT), (1, 6, IID), (0, 7, POINT)], {1, 2}),  # 6 hangs below 5
        ([(0, 5, POINT), (0, 7, POINT), (2, 6, IID), (2, 8, POINT)], {2, 3}),
        ([(0, 5, IID), (0, 5, POINT), (1, 6, POINT)], {1}),  # a node that two have guessed
    ):
        assert pinned_nodes(grown(*draws)) == pinned, draws


def test_the_likeliest_nodes_are_a_tree() -> None:
    for most, left in (
        (9, ALL),
        (7, ALL),
        (6, ALL - {(5, 6)}),
        (4, {(7,), (7, 8), (7, 9)}),
        (3, {(7,), (7, 8)}),  # of equal ones the earlier
        (1, set()),
    ):
        whole = tree()
        probabilities = {(): 1.0, (5,): 0.3, (5, 6): 0.1, (7,): 0.6, (7, 8): 0.5, (7, 8, 3): 0.2, (7, 9): 0.5}
        assert paths(likeliest(whole, [probabilities[whole.path_tokens(n)] for n in range(7)], most)) == left


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(allow_nan=True, allow_infinity=True)), max_size=20),
    st.integers(1, 22),
)
def test_whatever_speculators_say_of_their_guesses_what_is_left_is_a_tree(
    guesses: list[tuple[int, float]], most: int
) -> None:
    builder = TreeBuilder(root=0)
    for i, (parent, confidence) in enumerate(guesses):
        builder.add(parent % (i + 1), i + 1, "s", confidence=confidence)
    whole = builder.build()
    cut = likeliest(whole, whole.likelihoods(), most)
    assert cut.num_nodes == min(most, whole.num_nodes)
    assert paths(cut) <= paths(whole)
