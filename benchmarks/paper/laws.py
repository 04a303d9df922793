"""Exact acceptance of a tree's guesses by the rules of verification, from both models' laws, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.tree.distribution import Distribution
from specinfer.tree.draw import Draw, DrawRule
from specinfer.tree.token_tree import TokenTree, draws_by_parent

Law = NDArray[np.float64]  # [vocab], sums to 1
RULES: Final = {
    "mss": "multi-step sampling, i.i.d. draws",
    "naive": "naive sampling, i.i.d. draws",
    "likeliest": "naive sampling, the draft's likeliest",
}


def softmax(logits: NDArray[np.float32]) -> Law:
    """Return the law of a row of logits at temperature 1."""
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return np.asarray(weights / weights.sum())


def dense(draw: Draw) -> Law:
    """Return the law that a token was drawn from."""
    assert draw.law is not None, "sampled draws have laws"
    return draw.law.dense() if isinstance(draw.law, Distribution) else draw.law


def naive_tokens(tree: TokenTree, law: Callable[[int], Law]) -> float:
    """Return the mean tokens of a step if the target samples, and follows the child with its token.

    `law` returns the target's law after a node.
    """
    reached = [1.0] * tree.num_nodes
    laws = {parent: law(parent) for parent in {*tree.parents[1:]}}
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        reached[node] = reached[parent] * float(laws[parent][tree.token_ids[node]])
    return sum(reached)


def mss_tokens(tree: TokenTree, law: Callable[[int], Law]) -> float:
    """Return the mean tokens of a step of multi-step sampling, given the draws of the tree."""
    reached = [1.0] + [0.0] * (tree.num_nodes - 1)
    for parent, draws in sorted(draws_by_parent(tree.draws).items()):
        p, left, gone = law(parent), reached[parent], list[int]()
        for draw in draws:
            q, token = dense(draw), tree.token_ids[draw.node]
            if draw.rule is DrawRule.WITHOUT_REPLACEMENT and gone:
                q = np.array(q)
                q[gone] = 0.0
                q /= q.sum()
            accepted = min(1.0, float(p[token] / q[token]))
            reached[draw.node] += left * accepted
            left *= 1.0 - accepted
            p = residual(p, q)
            gone.append(token)
    return sum(reached)


def rates(p: Law, q: Law, rule: str, most: int) -> list[float]:
    """Return the probability that a rule accepts one of k guesses from q for one token, k = 1..most."""
    if rule == "likeliest":
        return [float(mass) for mass in p[np.argsort(-q, kind="stable")[:most]].cumsum()]
    if rule == "naive":
        return [float(p @ (1.0 - (1.0 - q) ** k)) for k in range(1, most + 1)]
    found, left = list[float](), 1.0
    for _ in range(most):
        left *= 1.0 - float(np.minimum(p, q).sum())
        found.append(1.0 - left)
        p = residual(p, q)
    return found


def residual(p: Law, q: Law) -> Law:
    """Return norm(max(0, p - q)), the target's law after a rejection; p if that is zero."""
    rest = np.maximum(p - q, 0.0)
    total = float(rest.sum())
    return np.asarray(rest / total) if total > 0 else p
