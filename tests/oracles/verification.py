"""Verification rules in plain Python, written by their definitions.

`multistep` and `naive` compute with the laws' number type, so with fractions they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol, TypeVar

from specinfer.tree.distribution import Distribution
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import TokenTree
from specinfer.verify.coupled import Acceptance
from specinfer.verify.noise import key_of, mix64

Number = TypeVar("Number", float, Fraction)


class Chance(Protocol):
    """Random decisions of a verifier, as `Coin` makes them, for any number type."""

    def accept(self, depth: int, turn: int, p: Number, q: Number) -> bool:
        """True with probability min(1, p / q); never when p is 0."""
        ...

    def pick(self, depth: int, turn: int, weights: Sequence[Number]) -> int:
        """Return an index with probability weights[index] / sum; never one of weight 0."""
        ...


def exponential(seed: int, position: int, token: int) -> float:
    """Return one value of `noise.exponentials`, in Python integers."""
    key = key_of(0, seed, position)
    low = mix64((token * 0x9E3779B97F4A7C15 + mix64(key ^ 0x9E3779B97F4A7C15)) % 2**64) >> 32
    x = token
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    x = (x ^ (x >> 16)) ^ (key % 2**32)
    x = x * 0x7FEB352D % 2**32
    x = ((x ^ (x >> 15)) + (key >> 32)) * 0x846CA68B % 2**32
    h = (x ^ (x >> 16)) * 2**32 + low
    # -log(1 - v) from the exact integer if it is large, with log1p(-v) if it is small
    return -math.log1p(-(h + 0.5) / 2**64) if h < 2**63 else -math.log((2**64 - 1 - h + 0.5) / 2**64)


def coupled_scores(weights: Sequence[float], seed: int, position: int) -> list[float]:
    """Return log p + Gumbel noise of every token, [vocab]; -inf for weight 0. Weights need not sum to 1."""
    return [
        math.log(weight) - math.log(exponential(seed, position, token)) if weight > 0 else -math.inf
        for token, weight in enumerate(weights)
    ]


def coupled_choice(weights: Sequence[float], seed: int, position: int) -> int:
    """Return the argmax of `coupled_scores`."""
    scores = coupled_scores(weights, seed, position)
    return scores.index(max(scores))


def coupled(tree: TokenTree, choices: Sequence[int]) -> Acceptance:
    """Return the longest path whose every node holds the target's choice after its parent; tries all
    nodes.

    `choices` is the target's choice after every node, [num_nodes].
    """
    agreed = [
        tree.path_to(node)
        for node in range(tree.num_nodes)
        if all(tree.token_ids[n] == choices[tree.parents[n]] for n in tree.path_to(node))
    ]
    path = max(agreed, key=len)
    return Acceptance(path, choices[path[-1] if path else 0])


def multistep(tree: TokenTree, law: Callable[[int], Sequence[Number]], chance: Chance) -> Acceptance:
    """SpecInfer's algorithm 2, draw by draw."""
    path: list[int] = []
    node = 0
    while True:
        p = list(law(node))
        turn = 0
        accepted = 0
        drawn: dict[str, set[int]] = {}  # speculator -> tokens that it drew here without replacement
        for draw in tree.draws:
            if draw.parent != node or accepted:
                continue
            token = tree.token_ids[draw.node]
            zero = p[0] - p[0]
            if draw.rule is DrawRule.POINT_MASS:
                q = [zero + (t == token) for t in range(len(p))]
            else:
                q = list(draw.law.dense() if isinstance(draw.law, Distribution) else draw.law)
                if draw.rule is DrawRule.WITHOUT_REPLACEMENT:
                    gone = drawn.setdefault(draw.speculator, set())
                    q = [zero if t in gone else mass for t, mass in enumerate(q)]
                    q = [mass / sum(q) for mass in q]
                    gone.add(token)
            if chance.accept(len(path), turn, p[token], q[token]):
                accepted = draw.node
            else:
                left = [max(zero, p_t - q_t) for p_t, q_t in zip(p, q, strict=True)]
                p = [mass / sum(left) for mass in left]
            turn += 1
        if not accepted:
            return Acceptance(tuple(path), chance.pick(len(path), turn, p))
        path.append(accepted)
        node = accepted


def naive(tree: TokenTree, law: Callable[[int], Sequence[Number]], chance: Chance) -> Acceptance:
    """Naive sampling, the paper's baseline: sample from the target, accept the child with that token, if
    any.
    """
    path: list[int] = []
    node = 0
    while True:
        token = chance.pick(len(path), 0, law(node))
        children = [
            n for n in range(tree.num_nodes) if tree.parents[n] == node and tree.token_ids[n] == token
        ]
        if not children:
            return Acceptance(tuple(path), token)
        path.append(children[0])
        node = children[0]
