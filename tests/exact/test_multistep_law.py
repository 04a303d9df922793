"""The law of the text under multi-step speculative sampling is the target's own, by exact enumeration.

Every way the draws and the coin can fall is played through the production verifier, over as many steps
as the text takes, and the probabilities are added up in float64.
"""

import numpy as np
import pytest

from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import TreeBuilder
from specinfer.verify.multistep import Coin, verify_multistep

from .enumeration import Guesser, World, distance, far, outcomes, own_law, step_law
from .oracles import processed_law

EXACT = 1e-9
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS

GUESSERS = {
    "no speculation": [Guesser("a", IID, ())],
    "a chain": [Guesser("a", IID, (1, 1))],
    "two i.i.d. draws": [Guesser("a", IID, (2, 1))],
    "three i.i.d. draws": [Guesser("a", IID, (3,))],
    "two without replacement": [Guesser("a", WITHOUT, (2, 1))],
    "all tokens without replacement": [Guesser("a", WITHOUT, (3,))],
    "point masses": [Guesser("a", POINT, (2, 2))],
    "all tokens as point masses": [Guesser("a", POINT, (3, 3))],
    "two i.i.d. speculators": [Guesser("a", IID, (1, 1)), Guesser("b", IID, (1,))],
    "i.i.d., then points": [Guesser("a", IID, (1, 1)), Guesser("b", POINT, (1, 1))],
    "points, then i.i.d.": [Guesser("b", POINT, (1, 1)), Guesser("a", IID, (1, 1))],
    "without replacement, then points": [Guesser("a", WITHOUT, (2,)), Guesser("b", POINT, (2, 1))],
    "two speculators without replacement": [Guesser("a", WITHOUT, (2,)), Guesser("b", WITHOUT, (2,))],
    "all three rules": [Guesser("a", IID, (1,)), Guesser("b", WITHOUT, (2,)), Guesser("c", POINT, (1, 1))],
}


def expected(world, length):
    return own_law(lambda t: processed_law(world.logits("target", t), world.params), world.vocab, length)


@pytest.mark.thorough
@pytest.mark.parametrize("guessers", GUESSERS.values(), ids=GUESSERS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_law_of_the_text_is_the_targets(guessers, length):
    world = World(vocab=3, seed=length)
    assert far(world, guessers, length) < EXACT


def test_a_speculator_equal_to_the_target_is_always_accepted():
    world = World(vocab=4)
    law = step_law(world, [Guesser("target", IID, (1, 1))], ())
    assert {len(tokens) for tokens, probability in law.items() if probability > EXACT} == {3}
    assert distance(law, expected(world, 3)) < EXACT


def root_with(draws):
    builder = TreeBuilder(root=0)
    for token, speculator, rule, law in draws:
        builder.add(0, token, speculator, rule, law)
    return builder.build()


def grid_law(coin_type):
    """The law of one token when all uniforms are 0, 1/4, 2/4, 3/4: exact for these laws, r = 0 included."""
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])

    def play(chance):
        tree = root_with([(chance.pick(0, 0, q), "a", IID, q)])
        coin = coin_type(lambda depth, turn: chance.choose([0.25] * 4) / 4)
        acceptance = verify_multistep(tree, lambda node: p if node == 0 else np.eye(3)[0], coin)
        return tree.token_ids[acceptance.path[0]] if acceptance.path else acceptance.next_token

    return outcomes(play)


def test_a_comparison_that_is_not_strict_accepts_a_token_of_probability_zero():
    class LaxCoin(Coin):
        def accept(self, depth, turn, p, q):
            return self.uniform(depth, turn) * q <= p

    assert grid_law(LaxCoin)[2] == 0.125  # drawn half of the time, accepted when r = 0
