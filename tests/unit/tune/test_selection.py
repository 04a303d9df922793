"""Which members pay: trees of known ranks, costs that can be added by hand, all subsets as the oracle."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.evaluation import NOT_RANKED, TokenRanks
from specinfer.tune.selection import Candidate, best_shapes, fastest, selected, speed_of

FLAT = CostCurve((1, 2), (1.0, 1.0))  # a pass takes a second, however many rows it has
RISING = CostCurve((1, 2), (1.0, 2.0))  # a second a row


def candidate(ranks: list[list[int]], curve: CostCurve = FLAT, *, one_pass: bool = False) -> Candidate:
    return Candidate(
        "draft", TokenRanks(torch.tensor(ranks), torch.zeros(len(ranks), dtype=torch.int64)), curve, one_pass
    )


def test_a_step_of_two_members_by_hand() -> None:
    #            place 0      1             2 (its vocabulary lacks the second token)
    one = candidate([[0, 0], [1, 0], [0, NOT_RANKED]])
    two = candidate([[0, 2], [0, 0], [3, 0]])
    alone = speed_of([one, two], RISING, {0: (1, 1)})
    assert alone.tokens_P.tolist() == [3, 1, 2]
    assert alone.seconds_P.tolist() == [3 + 2, 3 + 2, 3 + 2]  # three rows, and two passes of the draft
    both = speed_of([one, two], RISING, {0: (1, 1), 1: (1, 1)})
    assert both.tokens_P.tolist() == [3, 3, 2]
    # Five nodes and the root's row less what both have right: at place 0 the first token.
    assert both.seconds_P.tolist() == [4 + 4, 5 + 4, 5 + 4]
    assert both.tokens_per_second == pytest.approx(8 / 26)
    assert speed_of([one, two], RISING, {0: (2,)}).tokens_P.tolist() == [2, 2, 2]
    assert speed_of([one, two], RISING, {}).tokens_per_second == 1


def random_candidates(seed: int, count: int) -> list[Candidate]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ranks = generator.geometric(generator.uniform(0.3, 0.7), (40, 3)) - 1
        cost = float(generator.uniform(0.02, 0.3))
        found.append(candidate(ranks.tolist(), CostCurve((1, 2), (cost, 1.1 * cost))))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_shapes_are_as_quick_as_any(seed: int) -> None:
    """One member at a time finds what all combinations hold, or nearly."""
    pair, target = random_candidates(seed, 2), CostCurve((1, 8), (1.0, 2.0))
    every = product(pair[0].shapes(), pair[1].shapes())
    oracle = max(speed_of(pair, target, {0: a, 1: b}).tokens_per_second for a, b in every)
    assert best_shapes(pair, target, [0, 1]).tokens_per_second == pytest.approx(oracle, rel=0.005)


def test_a_member_that_guesses_what_others_do_is_not_taken() -> None:
    ranks = [[0, 0], [0, 1], [2, 0], [0, 0]]
    twins = [candidate(ranks, CostCurve((1, 2), (0.1, 0.1))) for _ in range(2)]
    pools = selected(twins, CostCurve((1, 8), (1.0, 2.0)))
    assert fastest(pools).members == (0,)
    assert pools[1].tokens_per_step == pools[0].tokens_per_step
    assert pools[1].step_seconds > pools[0].step_seconds
