"""The nodes to verify in a step: those that make the most tokens per second.

A step is expected to make so many tokens in so many seconds, and a node is worth its row while that ratio
grows:

    tokens   one for every request, and for every node the probability that it becomes text
    seconds  the target's pass at that many rows, and the passes of the drafts

The nodes of all requests in the batch compete. A node is never likelier than its parent, so the likeliest
nodes form trees.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import neg, truediv
from typing import Final, NamedTuple

_MORE_ROWS: Final = 4  # over which the price of a row is taken: a curve has steps


class StepCosts(NamedTuple):
    """The seconds of a step by the nodes below its roots, and the tokens it makes without any."""

    passes: Sequence[float]  # seconds of the target's pass by its rows
    rows: int  # of the pass without such nodes
    last: int  # rows with all nodes that there may be
    spent: float  # seconds of drafts' passes, less those that prompts take of the target's
    tokens: float  # one for each request

    def seconds(self, nodes: int) -> float:
        """Seconds of the step with so many nodes."""
        return self.spent + self.passes[min(self.rows + nodes, self.last)]

    def seconds_from(self, nodes: int, more: int) -> list[float]:
        """Seconds of the step with `nodes`, and with 1, 2, ... `more` nodes besides."""
        first = self.rows + nodes
        found = [self.spent + taken for taken in self.passes[first : min(first + more, self.last) + 1]]
        return found + [self.seconds(nodes + more)] * (more + 1 - len(found))

    def price(self, tokens: float, nodes: int) -> float:
        """The tokens that another row costs in a step that makes `tokens` with `nodes`."""
        seconds = self.seconds(nodes)
        return tokens * (self.seconds(nodes + _MORE_ROWS) - seconds) / (_MORE_ROWS * seconds)


class Candidates(NamedTuple):
    """One request's nodes: `probabilities` of each to become text, [num_nodes], the root's being 1."""

    probabilities: Sequence[float]
    firm: frozenset[int] | set[int]  # nodes that stay in any case (tree/prune.py)
    most: int  # nodes that the request may have, the root included
    all_stay: bool  # the request itself says how large its tree is


def choose(trees: Sequence[Candidates], costs: StepCosts) -> list[list[int]]:
    """The nodes of each tree to verify, ascending, the root included.

    Of equally likely nodes that of the earlier request stays, and there the earlier node.
    """
    tokens, nodes = costs.tokens, 0
    stay, loose = (
        list[list[int]](),
        list[list[int]](),
    )  # of each tree: nodes that stay, and loose ones
    likely = list[float]()  # of all nodes that may be dropped
    for probabilities, firm, most, all_stay in trees:
        found = [node for node in range(1, len(probabilities)) if node not in firm]
        room = max(0, most - 1 - len(firm))
        if len(found) > room:
            found = sorted(sorted(found, key=probabilities.__getitem__, reverse=True)[:room])
        kept = [0, *firm, *found] if all_stay else [0, *firm]
        tokens += sum([probabilities[node] for node in kept]) - 1
        nodes += len(kept) - 1
        stay.append(kept)
        loose.append([] if all_stay else found)
        likely += [probabilities[node] for node in loose[-1]]
    likely.sort(reverse=True)
    count = how_many(likely, tokens, costs.seconds_from(nodes, len(likely)))
    if not count:
        return [sorted(kept) for kept in stay]
    least = likely[count - 1]
    ties = count - bisect_left(likely, -least, key=neg)  # as likely as the least likely one that stays
    for kept, found, (probabilities, *_) in zip(stay, loose, trees, strict=True):
        for node in found:
            if probabilities[node] > least:
                kept.append(node)
            elif probabilities[node] == least and ties:
                kept.append(node)
                ties -= 1
    return [sorted(kept) for kept in stay]


def fastest(gains: Sequence[float], tokens: float, seconds: Iterable[float]) -> list[bool]:
    """Which of some candidates make a step's tokens per second highest, [n]; fewer at the same speed.

    Args:
        gains: the tokens each is expected to bring, [n]; equal ones are chosen in their order.
        tokens: expected of the step without any of them.
        seconds: of the step with 0, 1, ... of them, [n + 1] or more.
    """
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    chosen = [False] * len(gains)
    for number in order[: how_many([gains[n] for n in order], tokens, seconds)]:
        chosen[number] = True
    return chosen


def how_many(gains: Iterable[float], tokens: float, seconds: Iterable[float]) -> int:
    """How many of the first candidates to take: as `fastest`, of candidates that come best first."""
    speeds = [*map(truediv, accumulate(gains, initial=tokens), seconds)]
    return speeds.index(max(speeds))


def along_paths(rates: Sequence[float], parents: Sequence[int]) -> list[float]:
    """The rates from below the root down to each node multiplied, [num_nodes]; the root's is 1."""
    products = [1.0]
    for rate, parent in zip(rates[1:], parents[1:], strict=True):
        products.append(rate * products[parent])
    return products


def depth(parents: Sequence[int], node: int) -> int:
    """The levels from the root down to a node."""
    levels = 0
    while node:
        node, levels = parents[node], levels + 1
    return levels


NOTHING: Final = StepCosts([math.inf], 0, 0, 0.0, 0.0)  # before the first step
