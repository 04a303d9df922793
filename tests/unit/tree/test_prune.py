"""Pruning, on trees a person can check."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.distribution import Distribution
from specinfer.tree.draw import Draw, Runs, any_sampled, as_runs
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
def test_what_stays_is_text(guesses: list[list[int]], banned: set[tuple[int, int]], ending: set[int]) -> None:
    builder = TreeBuilder(root=0)
    for guess in guesses:
        node: int | None = 0
        for token in guess:
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
def test_what_is_left_of_guesses_is_a_tree(guesses: list[tuple[int, float]], most: int) -> None:
    builder = TreeBuilder(root=0)
    for i, (parent, confidence) in enumerate(guesses):
        builder.add(parent % (i + 1), i + 1, "s", confidence=confidence)
    whole = builder.build()
    cut = likeliest(whole, whole.likelihoods(), most)
    assert cut.num_nodes == min(most, whole.num_nodes)
    assert paths(cut) <= paths(whole)


# Drawings.


LAW, OTHER_LAW = np.array([0.5, 0.5]), np.array([0.25, 0.75])
MIXED = (
    Draw(0, 1, "a", DrawRule.POINT_MASS, None, 0.9, (1.0, 2.0)),
    Draw(1, 2, "a", DrawRule.POINT_MASS, None, 0.8, (3.0, 4.0)),
    Draw(1, 3, "a", DrawRule.POINT_MASS, None, 0.7, ()),
    Draw(0, 1, "b", DrawRule.IID, LAW, 0.6, (5.0,)),
    Draw(0, 4, "b", DrawRule.IID, OTHER_LAW, 0.5, (6.0,)),
    Draw(0, 1, "a", DrawRule.COUPLED, None, 0.4, (7.0, 8.0)),
)


def fields_of(draws: Sequence[Draw]) -> list[tuple[object, ...]]:
    return [tuple(draw) for draw in draws]


def test_runs_are_of_one_speculator_rule_and_number_of_pieces() -> None:
    runs = as_runs(MIXED).runs
    assert [(run.speculator, run.rule, run.pieces, [*run.nodes]) for run in runs] == [
        ("a", DrawRule.POINT_MASS, 2, [1, 2]),
        ("a", DrawRule.POINT_MASS, 0, [3]),
        ("b", DrawRule.IID, 1, [1, 4]),
        ("a", DrawRule.COUPLED, 2, [1]),
    ]
    assert [*runs[0].evidence] == [1.0, 2.0, 3.0, 4.0]
    assert [run.laws is None for run in runs] == [True, True, False, True]


def test_a_run_moves_to_other_nodes() -> None:
    (run,) = as_runs(MIXED[:2]).runs
    assert [(d.parent, d.node, d.evidence) for d in run.moved([0, 5, 9]).draws()] == [
        (0, 5, (1.0, 2.0)),
        (5, 9, (3.0, 4.0)),
    ]


def test_draws_at_nodes_that_are_kept_get_their_numbers() -> None:
    kept = Runs(as_runs(MIXED).runs, [0, -1, -1, -1, 1])  # the numbers of nodes 0, 1, ...
    for _ in range(2):  # before and after the draws are made
        assert (kept.drawn_by("a"), kept.drawn_by("b")) == (0, 1)
        [draw] = kept
        assert tuple(draw)[:4] == (0, 1, "b", DrawRule.IID)
        assert (draw.law, draw.evidence) == (OTHER_LAW, (6.0,)), "its own, not those of a draw before it"
    assert len(kept) == 1


def test_random_draws_are_kept_as_one_by_one() -> None:
    chance = random.Random(5)
    for _ in range(200):
        nodes = chance.randint(2, 9)
        sampled = [(DrawRule.IID, np.array([chance.random()])) for _ in range(2)]
        draws = [
            Draw(
                chance.randrange(node),
                node,
                chance.choice("ab"),
                *chance.choice([(DrawRule.POINT_MASS, None), (DrawRule.COUPLED, None), *sampled]),
                chance.random(),
                tuple(chance.random() for _ in range(chance.choice([0, 1, 2]))),
            )
            for node in (chance.randrange(1, nodes) for _ in range(chance.randint(0, 12)))
        ]
        numbers = [0, *(chance.choice([-1, node]) for node in range(1, nodes))]
        kept = Runs(as_runs(draws).runs, numbers)
        obvious = [d._replace(parent=numbers[d.parent]) for d in draws if numbers[d.node] >= 0]
        assert fields_of(kept) == fields_of(obvious)
        runs = as_runs(draws)
        assert as_runs(runs) is runs
        assert fields_of(runs) == fields_of(draws)
        assert fields_of(runs[1:3]) == fields_of(draws[1:3])


@pytest.mark.parametrize("rule", DrawRule)
def test_sampled_draws_are_seen_in_runs_as_one_by_one(rule: DrawRule) -> None:
    draws = [MIXED[0], Draw(0, 4, "b", rule, LAW if rule.is_sampled else None)]
    assert any_sampled(draws) == any_sampled(as_runs(draws)) == rule.is_sampled


SPARSE = Distribution(np.array([0.5, 0.2, 0.3]), np.array([1, 4, 6]), 8)
WHOLE = Distribution(np.array([0.1, 0.2, 0.7]), None, 3)


def test_dense_has_zeros_for_the_others() -> None:
    assert SPARSE.dense().tolist() == [0, 0.5, 0, 0, 0.2, 0, 0.3, 0]
    assert WHOLE.dense().tolist() == [0.1, 0.2, 0.7]


@pytest.mark.parametrize(("token", "place"), [(0, None), (1, 0), (4, 1), (5, None), (6, 2), (7, None)])
def test_a_token_has_a_place_in_the_support_or_none(token: int, place: int | None) -> None:
    assert SPARSE.index_of(token) == place
    assert place is None or SPARSE.id_at(place) == token
