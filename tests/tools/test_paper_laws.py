"""Exact figures of Table 3's page, against enumeration of the verifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.paper.laws import mss_tokens, naive_tokens, rates
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import TokenTree, TreeBuilder
from specinfer.verify.multistep import verify_multistep
from tests.exact.enumeration import outcomes
from tests.oracles import verification

VOCAB = 4
EXACT = 1e-12


def laws_of(seed: int) -> tuple[Any, Any]:
    """Laws of a target and of a draft after up to eight nodes."""
    return tuple(np.random.default_rng(seed).dirichlet(np.ones(VOCAB), (2, 8)))


def tree_of(rule: DrawRule, tokens: list[int], q: Any, below: tuple[int, ...] = ()) -> TokenTree:
    """A tree with these draws at the root, and some below the first of them."""
    builder = TreeBuilder(0)
    nodes = [builder.add(0, token, "draft", rule, q[0]) for token in tokens]
    for token in below:
        assert nodes[0] is not None
        builder.add(nodes[0], token, "draft", rule, q[1])
    return builder.build()


def test_mean_tokens_of_a_tree_are_those_of_the_verifiers() -> None:
    for seed in range(3):
        p, q = laws_of(seed)
        for rule, tokens in ((DrawRule.IID, [1, 1, 2]), (DrawRule.WITHOUT_REPLACEMENT, [1, 0, 2])):
            tree = tree_of(rule, tokens, q, below=(3, 2))
            verifiers: Any = ((mss_tokens, verify_multistep), (naive_tokens, verification.naive))
            for mean_tokens, verify in verifiers:
                found = outcomes(lambda chance: 1 + len(verify(tree, lambda node: p[node], chance).path))  # noqa: B023
                mean = sum(tokens * probability for tokens, probability in found.items())
                assert mean_tokens(tree, lambda node: p[node]) == pytest.approx(mean, abs=EXACT)  # noqa: B023


@pytest.mark.parametrize("rule", ["mss", "naive", "likeliest"])
def test_rates_are_those_of_all_draws(rule: str) -> None:
    verify: Any = verify_multistep if rule == "mss" else verification.naive
    p, q = laws_of(seed=3)
    likeliest = np.argsort(-q[0]).tolist()
    for k, rate in enumerate(rates(p[0], q[0], rule, 3), start=1):

        def accepts(chance: Any, k: int = k) -> bool:
            drawn = [chance.choose(q[0]) for _ in range(k)] if rule != "likeliest" else likeliest[:k]
            tree = tree_of(DrawRule.IID, drawn, q)
            return bool(verify(tree, lambda node: p[node], chance).path)

        assert rate == pytest.approx(outcomes(accepts)[True], abs=EXACT)
