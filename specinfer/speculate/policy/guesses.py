"""What is hoped of one request's guesses while a draft is asked, level by level, to add to them.

The draft's own tree and what others have guessed are one tree here: a level brings only what nobody else
holds. So whatever is known without the draft is known when its next level is weighed.
"""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.tokens_per_second import total
from specinfer.tree import Draw, TokenTree
from specinfer.tree.draw import any_sampled, as_runs
from specinfer.tree.merging import MergedTree, firm_nodes, sampled


class Guesses:
    """The guesses for one request so far in a step, `tree` being those of others, and their probabilities.

    `rates` says how likely each of its nodes is to become text if its parent does, [num_nodes].
    """

    def __init__(self, tree: TokenTree, rates: Sequence[float]) -> None:
        self.samples = False  # whether the draft draws nodes that cannot be dropped
        self.probabilities = along_paths(rates, tree.parents)  # of nodes to become text, [num_nodes]
        self._tree = tree
        self._merged = MergedTree(tree)  # the draft's guesses among the others', without draws
        self._rates = [1.0, *rates[1:]]
        self._firm = firm_nodes(tree)
        self._parts: tuple[float, int, list[float]] | None = None
        # Of the draft's tree: where its nodes are here, and its draws.
        self._nodes = [0]
        self._drawn: list[Draw] = []

    def grow(self, draft: TokenTree) -> list[Draw]:
        """Add what is new in the draft's tree, which has grown.

        Returns its new draws and all others below the same nodes, about which `estimate` is to be told.
        """
        others = self._tree.num_nodes
        self._merged.place(draft, self._nodes, others)
        told = as_runs(draft.draws[len(self._drawn) :]).runs
        new = [draw for run in told for draw in run.moved(self._nodes).draws()]
        self._drawn += new
        self._rates += [0.0] * (self.num_nodes - len(self._rates))
        if any_sampled(new):
            self.samples = True
            self._firm.update([draw.node for draw in new if sampled(draw)])
        shared = {draw.parent for draw in new if draw.parent < others}
        return [draw for draw in self._tree.draws if draw.parent in shared] + new if shared else new

    def estimate(self, draws: Sequence[Draw], rates: Sequence[float]) -> None:
        """Take the rates of the nodes that hold these draws, out of [num_nodes]."""
        own, known, parents = self._rates, self.probabilities, self._merged.parents
        first = len(known)  # of the nodes whose probability is not known, or no longer
        for draw in draws:
            node = draw.node
            if own[node] != rates[node]:
                own[node] = rates[node]
                first = min(first, node)
        del known[first:]
        for node in range(first, len(own)):
            known.append(own[node] * known[parents[node]])
        self._parts = None

    @property
    def num_nodes(self) -> int:
        """The nodes there are, the root included."""
        return len(self._merged.parents)

    def gain(self, end: int, rate: LevelRate, price: float) -> float:
        """The tokens that children of a node of the draft's tree are to bring, and nobody else holds.

        `rate` is of the level below it. The first of them has a row of the target's; of what the others bring
        `price` is taken, the tokens that another row costs. Samples are all verified, so what they cost is
        known to who asks.
        """
        node = self._nodes[end]
        return gain(self.probabilities[node] * self.left(node), rate, 0.0 if self.samples else price)

    def left(self, node: int) -> float:
        """How likely it is that nobody else holds the token behind a node."""
        if node >= self._tree.num_nodes:
            return 1.0
        held = {draw.node for draw in self._tree.draws if draw.parent == node}
        return max(0.0, 1.0 - total(map(self._rates.__getitem__, sorted(held))))

    def parts(self, most: int, *, all_stay: bool) -> tuple[float, int, list[float]]:
        """What a tree of `most` nodes can hold: tokens and nodes that stay, and what each other would bring.

        The root is in none of them. The others may be dropped and come likeliest first; none if `all_stay`.
        Both are the request's, the same whenever it is asked.
        """
        if self._parts is not None:
            return self._parts
        tokens, nodes = 0.0, len(self._firm)
        droppable = self.probabilities[1:]
        if nodes:
            tokens = total(map(self.probabilities.__getitem__, sorted(self._firm)))
            droppable = [p for node, p in enumerate(droppable, start=1) if node not in self._firm]
        droppable.sort(reverse=True)
        del droppable[max(0, most - 1 - nodes) :]
        if all_stay:
            tokens, nodes, droppable = tokens + total(droppable), nodes + len(droppable), []
        self._parts = tokens, nodes, droppable
        return self._parts


def gain(arrives: float, rate: LevelRate, price: float) -> float:
    """The tokens that a level brings behind a node that becomes text, and is left to it, so probably."""
    return arrives * rate.first + max(0.0, arrives * rate.other - price)


def along_paths(rates: Sequence[float], parents: Sequence[int]) -> list[float]:
    """The rates from below the root down to each node multiplied, [num_nodes]; the root's is 1."""
    products = [1.0]
    for node in range(1, len(parents)):
        products.append(rates[node] * products[parents[node]])
    return products
