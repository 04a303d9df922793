"""The coupled rule gives the target's own choices whatever the tree, and these follow the target's law.

The noise cannot be enumerated by branching. So the proof has three parts. The text does not depend on the
tree (exhaustively on tiny vocabularies; with drafts in test_parameters.py). The winner of the exponential
race has the law p (on a grid of all uniforms); the noise is what the race supposes
(tests/unit/verify/test_noise.py, and chi-square here).
"""

from itertools import product

import numpy as np
import pytest
import torch

from specinfer.engine.target_laws import TargetLaws, verify_trees
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from specinfer.verify import noise
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.scan import NUMPY
from specinfer.verify.target_law import target_law
from tests import plans
from tests.goodness import chi_square
from tests.oracles import verification

from .enumeration import World, all_trees


class NotedFlight(Flight):
    """Notes the rows whose choice is read."""

    def __init__(self, choices):
        logits = torch.eye(2)[list(choices)]
        super().__init__(logits, lambda rows: rows, 2, NUMPY)
        self.read = []

    def choices(self, rows, asks, changes=None):
        self.read += rows
        return super().choices(rows, asks, changes)


@pytest.mark.thorough
# About 8 s: the central law, with drawn trees.
def test_any_tree_and_any_choices_give_the_targets_own_text():
    entry, checked = plans.entry([0], params=SamplingParams(temperature=0)), 0
    for tree in all_trees(vocab=2, max_nodes=5):
        for choices in product(range(2), repeat=tree.num_nodes):
            flight = NotedFlight(choices)
            [acceptance] = verify_trees([TargetLaws(entry, tree, flight, 0)], "coupled", flight)
            visited = [0, *acceptance.path]
            tokens = [*(tree.token_ids[n] for n in acceptance.path), acceptance.next_token]
            assert flight.read == visited, "choices after visited nodes only, once each"
            assert tokens == [choices[node] for node in visited], "every token is the target's own choice"
            assert tokens[-1] not in tree.children()[visited[-1]], "it goes as deep as the tree agrees"
            assert acceptance == verification.coupled(tree, choices)
            checked += 1
    assert checked > 3000


def test_the_race_has_the_law_p_on_a_grid_of_all_uniforms():
    p = np.array([0.6, 0.3, 0.1])
    n = 100
    highs = ((np.arange(n) + 0.5) / n * 2**32).astype(np.uint32)
    E = noise.exponentials_from(highs, 0, np.arange(n))
    a, b, c = E[:, None, None] / p[0], E[None, :, None] / p[1], E[None, None, :] / p[2]
    wins = [((a < b) & (a < c)).mean(), ((b <= a) & (b < c)).mean(), ((c <= a) & (c <= b)).mean()]
    assert wins == pytest.approx(p, abs=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=4, temperature=0.8)])
def test_choices_follow_the_law_over_positions_and_over_seeds(params, over):
    law = target_law(World(vocab=8).logits("target", ()), params)
    keys = ((3, i) if over == "positions" else (i, 3) for i in range(6000))
    counts = np.bincount([coupled_choice(law, *key) for key in keys], minlength=8)
    p = law.dense()
    assert counts[p == 0].sum() == 0
    assert chi_square(counts[p > 0], 6000 * p[p > 0]) > 1e-3


def test_neighbouring_positions_choose_independently():
    law = target_law(np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32)), SamplingParams())
    choices = np.array([coupled_choice(law, 17, i) for i in range(9001)])
    pairs = np.bincount(choices[:-1] * 3 + choices[1:], minlength=9)
    p = law.dense()
    assert chi_square(pairs, 9000 * np.outer(p, p).ravel()) > 1e-3
