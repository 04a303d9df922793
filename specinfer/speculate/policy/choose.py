"""Choose the nodes to verify in a step: those that maximize tokens per second.

A node is worth its row while the step's expected tokens per second grow:

    tokens   one for every request, and for every node its acceptance probability
    seconds  the target's pass at that number of rows, and the passes of the drafts

The nodes of all requests in the batch compete. A node is never likelier than its parent, so the likeliest
nodes form trees.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, compress, repeat
from operator import truediv
from typing import Final, NamedTuple

from specinfer.plan import PlanEntry
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.policy import has_own_size
from specinfer.tree import TokenTree
from specinfer.tree.merging import pinned_nodes

_MORE_ROWS: Final = 4  # rows over which the price of a row is averaged, as cost curves have steps


class StepCosts(NamedTuple):
    """Seconds of a step by its number of guesses, and its expected tokens with the guesses so far."""

    passes: Sequence[float]  # seconds of the target's pass with 0, 1, ... guesses
    prompts: float  # the target's seconds for prompts
    row: float  # seconds of another row of the target's pass in a step without prompts
    tokens: float  # one for each request, and those expected of guesses
    nodes: int = 0  # number of guesses so far
    spent: float = 0.0  # seconds of drafts' passes

    def seconds(self, more: int = 0) -> float:
        """Return the seconds of the step with `more` guesses than so far, less those for prompts."""
        return self.spent - self.prompts + self.passes[min(self.nodes + more, len(self.passes) - 1)]

    @property
    def price(self) -> float:
        """The tokens that another row must yield to be worth its seconds."""
        seconds = self.seconds()
        return self.tokens * (self.seconds(_MORE_ROWS) - seconds) / (_MORE_ROWS * seconds)


class Candidates:
    """One request's guesses as candidates for verification."""

    def __init__(self, entry: PlanEntry, tree: TokenTree, acceptance: AcceptanceRates) -> None:
        self.entry, self.tree = entry, tree
        self.all_stay = has_own_size(entry)
        self.pinned = pinned_nodes(tree)  # nodes that may not be dropped
        self.rates = acceptance.node_rates(tree)
        self.probabilities = path_probabilities(self.rates, tree.parents)


def choose(guesses: Sequence[Candidates], costs: StepCosts) -> list[list[int]]:
    """Return the nodes of each tree to verify, ascending, the root included; `costs` are of no guesses.

    Ties keep the node of the earlier request, and within a request the earlier node.
    """
    tokens, nodes = costs.tokens, 0
    # For each tree: the nodes that stay, and those that may be dropped.
    parts = list[tuple[list[int], list[int]]]()
    likely = list[float]()  # probabilities of all nodes that may be dropped
    for one in guesses:
        probabilities, kept = one.probabilities, [0, *one.pinned]
        found = [node for node in range(1, len(probabilities)) if node not in one.pinned]
        room = max(0, one.entry.max_nodes - len(kept))
        if len(found) > room:
            found.sort(key=probabilities.__getitem__, reverse=True)
            del found[room:]
        if one.all_stay:
            kept, found = kept + found, []
        tokens += sum([probabilities[node] for node in kept]) - 1
        nodes += len(kept) - 1
        parts.append((kept, found))
        likely += [probabilities[node] for node in found]
    # Each tree takes as many answers as it has nodes that may be dropped.
    other, passes = costs.spent - costs.prompts, chain(costs.passes[nodes:], repeat(costs.passes[-1]))
    stays = iter(fastest(likely, tokens, (other + seconds for seconds in passes)))
    return [sorted([*kept, *compress(found, stays)]) for kept, found in parts]


def fastest(gains: Sequence[float], tokens: float, seconds: Iterable[float]) -> list[bool]:
    """Return which candidates maximize a step's tokens per second, [n]; fewer of them at the same speed.

    Args:
        gains: expected tokens of each candidate, [n]; ties are chosen in order.
        tokens: expected tokens of the step without candidates.
        seconds: seconds of the step with 0, 1, ... candidates, [n + 1] or more.
    """
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    chosen = frozenset(order[: best_count([gains[n] for n in order], tokens, seconds)])
    return [number in chosen for number in range(len(gains))]


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
