"""Each classic mistake, made on purpose, changes the law, and the enumeration sees it.

The strict comparison has its mutant in test_multistep_law.py, where uniforms lie on a grid.
"""

import numpy as np
import pytest

from specinfer.tree.draw import Draw, DrawRule
from specinfer.tree.token_tree import TokenTree
from specinfer.verify import multistep

from .enumeration import Guesser, World, distance, own_law, step_law, text_law

IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS
SEEN = 1e-3


def error(guessers, **how):
    """How far the law of two tokens is from the target's."""
    world = World(vocab=4, seed=2)
    return distance(text_law(world, guessers, 2, **how), own_law(lambda t: world.law("target", t), 4, 2))


def redraw(tree, draws):
    return TokenTree(tree.token_ids, tree.parents, tuple(draws))


def with_rule(tree, rule):
    return redraw(tree, (Draw(d.parent, d.node, d.speculator, rule, d.law) for d in tree.draws))


MERGED = [Guesser("a", IID, (1,)), Guesser("b", IID, (1,))]


def test_merging_draws_as_if_they_were_nodes():
    def first_of_each_node(tree):
        return redraw(tree, {draw.node: draw for draw in reversed(tree.draws)}.values())

    assert error(MERGED) < 1e-9
    assert error(MERGED, alter=first_of_each_node) > SEEN


@pytest.mark.thorough
def test_pruning_sampled_draws_by_their_own_probability():
    def prune(tree):
        return redraw(tree, (d for d in tree.draws if d.law[tree.token_ids[d.node]] > 0.2))

    assert error([Guesser("a", IID, (2, 1))], alter=prune) > SEEN


class PointWorld(World):
    """p = (.5, .5) and q = (.9, .1) after every text."""

    def law(self, model, text):
        return np.array([0.5, 0.5] if model == "target" else [0.9, 0.1])


def test_top_k_children_taken_for_samples_give_the_known_bias():
    world = PointWorld(vocab=2)
    guessers = [Guesser("a", POINT, (1,))]

    def first_token(law):
        return sum(probability for tokens, probability in law.items() if tokens[0] == 0)

    def declare_sampled(tree):
        q = world.law("a", ())
        return redraw(tree, (Draw(d.parent, d.node, d.speculator, IID, q) for d in tree.draws))

    assert first_token(step_law(world, guessers, ())) == pytest.approx(0.5, abs=1e-12)
    biased = first_token(step_law(world, guessers, (), alter=declare_sampled))
    assert biased == pytest.approx(0.5 / 0.9, abs=1e-12)


def test_taking_draws_without_replacement_for_independent_ones():
    guessers = [Guesser("a", WITHOUT, (2,))]
    assert error(guessers) < 1e-9
    assert error(guessers, alter=lambda tree: with_rule(tree, IID)) > SEEN


def test_removing_earlier_draws_without_renormalising(monkeypatch):
    proposal = multistep._proposal

    def not_renormalised(tree, earlier, draw, vocab):
        q = proposal(tree, earlier, draw, vocab)
        return q * (1 - sum(draw.law[tree.token_ids[d.node]] for d in earlier))

    monkeypatch.setattr(multistep, "_proposal", not_renormalised)
    assert error([Guesser("a", WITHOUT, (2,))]) > SEEN


def test_forgetting_to_remove_a_rejected_point_mass(monkeypatch):
    after_rejection = multistep._after_rejection

    def keeps_points(p, q):
        return p if q.max() == 1 else after_rejection(p, q)

    monkeypatch.setattr(multistep, "_after_rejection", keeps_points)
    assert error([Guesser("a", POINT, (2,))]) > SEEN


def test_sampling_the_bonus_token_from_the_target_instead_of_what_is_left(monkeypatch):
    monkeypatch.setattr(multistep, "_after_rejection", lambda p, q: p)
    assert error([Guesser("a", IID, (1,))]) > SEEN
