"""SharedTree: one request's tree, to which speculators add in turn."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.plan import PlanEntry
from specinfer.tree import TokenTree, merge
from specinfer.tree.draw import any_sampled
from specinfer.tree.merging import MergedTree
from specinfer.tree.token_tree import single_node


class SharedTree:
    """The merged guesses for one request, built in the course of a step.

    Guesses that may be dropped do not count against the node budget: the tree may exceed it until all
    speculators have guessed, and then the best nodes are kept. Sampled draws are never dropped, so they
    count, and come before the other draws below every node.
    """

    def __init__(self, entry: PlanEntry) -> None:
        self.entry = entry
        self.taken = 0  # nodes that cannot be dropped, which reduce the budget of later speculators
        self._tree: TokenTree | None = single_node(entry.token_ids[entry.end - 1])  # None: build from _merged
        self._merged: MergedTree | None = None
        self._sampled: list[TokenTree] = []
        self._others: list[TokenTree] = []

    @property
    def tree(self) -> TokenTree:
        """The merged tree."""
        if self._tree is None:
            assert self._merged is not None, "without a tree there is a merged one"
            self._tree = self._merged.build()
        return self._tree

    def add(self, tree: TokenTree) -> None:
        """Merge one speculator's tree, which fits into the remaining node budget."""
        if tree.num_nodes == 1:
            return
        if not any_sampled(tree.draws):
            self._others.append(tree)
            self._graft([tree])
            return
        self._sampled.append(tree)
        self._tree = merge(self._sampled)
        self.taken = self._tree.num_nodes - 1
        self._merged = None
        self._graft(self._others)

    def _graft(self, trees: Sequence[TokenTree]) -> None:
        """Merge trees of guesses that may be dropped."""
        if self._merged is None and trees:
            if self.tree.num_nodes == 1 and len(trees) == 1:
                self._tree = trees[0]
                return
            self._merged = MergedTree(self.tree)
        for tree in trees:
            assert self._merged is not None, "there are trees"
            self._merged.graft(tree)
            self._tree = None
