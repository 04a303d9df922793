"""Choose the nodes to verify in a step: those that maximize tokens per second.

A node is worth its row while the step's expected tokens per second grow:

    tokens   one for every request, and for every node its acceptance probability
    seconds  the target's pass at that number of rows, and the passes of the drafts

The nodes of all requests in the batch compete. A node is never likelier than its parent, so the likeliest
nodes form trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress
from operator import truediv
from typing import Final, NamedTuple

_MORE_ROWS: Final = 4  # rows over which the price of a row is averaged, as cost curves have steps


class StepCosts(NamedTuple):
    """Seconds of a step by its number of guesses, and its tokens without guesses."""

    passes: Sequence[float]  # seconds of the target's pass by its rows
    rows: int  # rows of the pass without guesses
    last: int  # rows of the pass with the maximum number of guesses
    spent: float  # seconds of drafts' passes, less the target's seconds for prompts
    tokens: float  # one for each request

    def seconds(self, nodes: int) -> float:
        """Return the seconds of the step with `nodes` guesses."""
        return self.spent + self.passes[min(self.rows + nodes, self.last)]

    def seconds_from(self, nodes: int, more: int) -> list[float]:
        """Return the seconds of the step with `nodes`, `nodes` + 1, ... `nodes` + `more` guesses."""
        first = self.rows + nodes
        found = [self.spent + taken for taken in self.passes[first : min(first + more, self.last) + 1]]
        return found + [self.seconds(nodes + more)] * (more + 1 - len(found))

    def price(self, tokens: float, nodes: int) -> float:
        """Return the price of another row, in tokens, for a step that makes `tokens` with `nodes` guesses."""
        seconds = self.seconds(nodes)
        return tokens * (self.seconds(nodes + _MORE_ROWS) - seconds) / (_MORE_ROWS * seconds)


class Candidates(NamedTuple):
    """One request's nodes as candidates for verification."""

    probabilities: Sequence[float]  # acceptance probabilities, [num_nodes]; the root's is 1
    pinned: set[int]  # nodes that may not be dropped (tree/merging.py)
    max_nodes: int  # maximum nodes of the request, the root included
    all_stay: bool  # True if the request sets the size of its tree


def choose(trees: Sequence[Candidates], costs: StepCosts) -> list[list[int]]:
    """Return the nodes of each tree to verify, ascending, the root included.

    Ties keep the node of the earlier request, and within a request the earlier node.
    """
    tokens, nodes = costs.tokens, 0
    # For each tree: the nodes that stay, and those that may be dropped.
    stay, droppable = list[list[int]](), list[list[int]]()
    likely = list[float]()  # probabilities of all nodes that may be dropped
    for probabilities, pinned, max_nodes, all_stay in trees:
        found = [node for node in range(1, len(probabilities)) if node not in pinned]
        room = max(0, max_nodes - 1 - len(pinned))
        if len(found) > room:
            found = sorted(sorted(found, key=probabilities.__getitem__, reverse=True)[:room])
        kept = [0, *pinned, *found] if all_stay else [0, *pinned]
        tokens += sum([probabilities[node] for node in kept]) - 1
        nodes += len(kept) - 1
        stay.append(kept)
        droppable.append([] if all_stay else found)
        likely += [probabilities[node] for node in droppable[-1]]
    # Each tree takes as many answers as it has nodes that may be dropped.
    stays = iter(fastest(likely, tokens, costs.seconds_from(nodes, len(likely))))
    return [sorted([*kept, *compress(found, stays)]) for kept, found in zip(stay, droppable, strict=True)]


def fastest(gains: Sequence[float], tokens: float, seconds: Iterable[float]) -> list[bool]:
    """Return which candidates maximize a step's tokens per second, [n]; fewer of them at the same speed.

    Args:
        gains: expected tokens of each candidate, [n]; ties are chosen in order.
        tokens: expected tokens of the step without candidates.
        seconds: seconds of the step with 0, 1, ... candidates, [n + 1] or more.
    """
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    chosen = [False] * len(gains)
    for number in order[: best_count([gains[n] for n in order], tokens, seconds)]:
        chosen[number] = True
    return chosen


def best_count(gains: Iterable[float], tokens: float, seconds: Iterable[float]) -> int:
    """Return the number of leading candidates that `fastest` would choose, for `gains` in falling order."""
    speeds = [*map(truediv, accumulate(gains, initial=tokens), seconds)]
    return speeds.index(max(speeds))


def path_probabilities(rates: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Return the product of the rates on each node's path, [num_nodes]; the root's is 1."""
    products = [1.0]
    for rate, parent in zip(rates[1:], parents[1:], strict=True):
        products.append(rate * products[parent])
    return products


NOTHING: Final = StepCosts([math.inf], 0, 0, 0.0, 0.0)  # before the first step
