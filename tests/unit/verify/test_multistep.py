"""Multi-step sampling on literals, against its oracle, and what it refuses. The law: tests/exact."""

import numpy as np
import pytest

from specinfer.errors import DrawRuleError, IntegrityError
from specinfer.tree import DrawRule, TokenTree, TreeBuilder, merge
from specinfer.tree.draw import PAIRS, check_pair
from specinfer.verify.coupled import Acceptance
from specinfer.verify.multistep import Coin, seeded_coin, verify_multistep
from specinfer.verify.target_law import inverse_cdf
from tests.oracles import verification

IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS


def root_with(*draws):
    builder = TreeBuilder(root=0)
    for token, rule, law in draws:
        builder.add(0, token, "s", rule, None if law is None else np.array(law, dtype=np.float64))
    return builder.build()


def verify(tree, p, uniforms):
    """Verify with the same law after every node, and these uniforms by [depth][turn]."""
    coin = Coin(lambda depth, turn: uniforms[depth][turn])
    return verify_multistep(tree, lambda node: np.array(p), coin)


def test_r_zero_does_not_accept_a_token_of_probability_zero():
    tree = root_with((1, IID, [0.5, 0.5]), (1, POINT, None))
    assert verify(tree, [1.0, 0.0], [[0.0, 0.0, 0.0]]) == Acceptance((), 0)


def test_the_walk_goes_on_below_an_accepted_node_and_asks_only_about_visited_nodes():
    builder = TreeBuilder(root=0)
    first = builder.add(0, 1, "s")
    builder.add(0, 2, "s")
    second = builder.add(first, 2, "s")
    asked = []

    def law(node):
        asked.append(node)
        return np.array([0.0, 0.5, 0.5])

    coin = Coin(lambda depth, turn: 0.4)
    assert verify_multistep(builder.build(), law, coin) == Acceptance((first, second), 1)
    assert asked == [0, first, second]


def test_a_residual_lost_to_rounding_leaves_the_law_as_it_was():
    p = [0.5, 0.5]
    q = [np.nextafter(0.5, 1), 0.5]  # sums to 1 in floats; p - q has no positive entry
    coin = Coin(lambda depth, turn: np.nextafter(1, 0))
    got = verify_multistep(root_with((0, IID, q)), lambda node: np.array(p), coin)
    assert got.next_token in (0, 1)


@pytest.mark.parametrize("seed", range(60))
def test_it_agrees_with_the_oracle_on_random_merged_trees(seed):
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.full(6, 0.5), size=40)

    def tree_of(name, rule):
        builder = TreeBuilder(root=0)
        for parent in (0, 0, 0, 1, 1, 2):
            if parent >= len(builder.token_ids):
                continue
            q = rng.dirichlet(np.ones(6)) if rule is IID else np.full(6, 1 / 6)
            gone = [builder.token_ids[d.node] for d in builder.draws if d.parent == parent]
            left = np.where(np.isin(np.arange(6), gone), 0, q) if rule is WITHOUT else q
            token = inverse_cdf(left, rng.random())
            builder.add(parent, token, name, rule, None if rule is POINT else q)
        return builder.build()

    tree = merge([tree_of("a", IID), tree_of("b", WITHOUT), tree_of("c", POINT), tree_of("d", IID)])
    tree.check_integrity()
    for request in range(10):
        fast = verify_multistep(tree, lambda node: laws[node], seeded_coin(request, 4))
        slow = verification.multistep(tree, lambda node: laws[node].tolist(), seeded_coin(request, 4))
        assert fast == slow


def test_inverse_cdf_never_returns_an_index_of_weight_zero():
    weights = np.array([0.0, 2.0, 0.0, 6.0, 0.0])
    falls = {u: inverse_cdf(weights, u) for u in (0.0, 0.2499, 0.25, 0.9, np.nextafter(1, 0))}
    assert list(falls.values()) == [1, 1, 3, 3, 3]
    # Seven times 0.1 cumulates to a little less than 0.7: u * total may round to the total.
    assert inverse_cdf(np.array([0.1] * 7 + [0.0]), np.nextafter(1, 0)) == 6


REFUSED = [
    ((1, DrawRule.COUPLED, None), "cannot treat losslessly"),
    ((1, IID, None), "carries no law"),
    ((1, WITHOUT, None), "carries no law"),
    ((1, IID, [0.5, 0.5]), "has shape"),
    ((1, IID, [0.5, 0.5, 0.5]), "sums to 1.5"),
    ((1, IID, [-0.5, 0.5, 1.0]), "must be a distribution"),
    ((1, IID, [np.nan, 0.5, 0.5]), "must be a distribution"),
    ((1, IID, [0.5, 0.0, 0.5]), "probability zero under its own law"),
    ((3, POINT, None), "outside the target's vocabulary of 3"),
]


def test_a_draw_that_cannot_be_treated_losslessly_is_refused():
    for draw, says in REFUSED:
        with pytest.raises(DrawRuleError, match=says):
            verify(root_with(draw), [0.2, 0.3, 0.5], [[0.5, 0.5], [0.5]])
    twice = (1, WITHOUT, [0.2, 0.3, 0.5])
    with pytest.raises(DrawRuleError, match="probability zero"):
        verify(root_with(twice, twice), [0.9, 0.0, 0.1], [[0.5, 0.5]])


@pytest.mark.parametrize("p", [[0.2, 0.3], [np.nan, 1.0], [1.5, -0.5]])
def test_a_target_law_that_is_none_is_an_integrity_error(p):
    with pytest.raises(IntegrityError, match="the target's law after node 0"):
        verify(TokenTree((0,), (-1,)), p, [[0.5]])


def test_the_pairs():
    assert PAIRS["coupled"].accepted == set(DrawRule)
    assert PAIRS["mss"].accepted == set(DrawRule) - {DrawRule.COUPLED}
    check_pair("coupled", DrawRule, "any")
    check_pair("mss", [IID, POINT], "draft")
    with pytest.raises(DrawRuleError, match=r"'draft' proposes coupled draws.* iid, point_mass"):
        check_pair("mss", [IID, DrawRule.COUPLED], "draft")
