"""Draws as columns are the same draws as one by one, and their laws over a support the dense ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from specinfer.tree.distribution import Distribution
from specinfer.tree.draw import Draw, DrawRule, Runs, any_sampled, as_runs

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
