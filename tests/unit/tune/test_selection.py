"""How many members pay: trees of known ranks, costs that can be added by hand, and a search as the oracle."""

from itertools import product

import numpy as np
import pytest
import torch

from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.evaluation import NOT_RANKED, TokenRanks
from specinfer.tune.selection import Candidate, Selection, speed_of

FLAT = CostCurve((1, 2), (1.0, 1.0))  # a pass takes a second, however many rows it has
RISING = CostCurve((1, 2), (1.0, 2.0))  # a second a row


def candidate(ranks: list[list[int]], curve: CostCurve = FLAT, name: str = "draft") -> Candidate:
    return Candidate(name, TokenRanks(torch.tensor(ranks)), curve, False)


def test_a_step_of_two_members_by_hand() -> None:
    #            place 0      1             2 (its vocabulary lacks the second token)
    one = candidate([[0, 0], [1, 0], [0, NOT_RANKED]])
    two = candidate([[0, 2], [0, 0], [3, 0]])
    alone = speed_of([one], RISING, (1, 1))
    assert alone.tokens_P.tolist() == [3, 1, 2]
    assert alone.seconds_P.tolist() == [3 + 2, 3 + 2, 3 + 2]  # three rows, and two passes of the draft
    both = speed_of([one, two], RISING, (1, 1))
    assert both.tokens_P.tolist() == [3, 3, 2]
    # Five nodes and the root's row less what both have right: at place 0 the first token.
    assert both.seconds_P.tolist() == [4 + 4, 5 + 4, 5 + 4]
    assert both.tokens_per_second == pytest.approx(8 / 26)
    assert speed_of([one], RISING, (2,)).tokens_P.tolist() == [2, 2, 2]
    assert speed_of([one, candidate([[0], [0], [0]])], RISING, (1, 1)).tokens_P.tolist() == [3, 2, 2]


@pytest.mark.parametrize("seed", range(6))
def test_the_shape_and_the_size_are_as_quick_as_any(seed: int) -> None:
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(3):
        ranks = generator.geometric(generator.uniform(0.3, 0.7), (40, 3)) - 1
        cost = float(generator.uniform(0.02, 0.3))
        made.append(candidate(ranks.tolist(), CostCurve((1, 2), (cost, 1.1 * cost))))
    target = CostCurve((1, 8), (1.0, 2.0))
    whole, few = ((1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1)), (1, 2, 3)
    pools = [(made[:count], shape[:levels]) for shape, levels, count in product(whole, few, few)]
    oracle = max(speed_of(pool, target, shape).tokens_per_second for pool, shape in pools)
    assert Selection(made, target).best.tokens_per_second == oracle


def test_a_member_that_guesses_what_others_do_is_not_taken() -> None:
    ranks = [[0, 0], [0, 1], [2, 0], [0, 0]]
    twins = [candidate(ranks, CostCurve((1, 2), (0.1, 0.1)), name) for name in ("one", "two")]
    selection = Selection(twins, CostCurve((1, 8), (1.0, 2.0)))
    assert (selection.best.names, selection.dropped) == (("one",), ["two"])
    assert selection.pools[1].tokens_per_second < selection.pools[0].tokens_per_second
