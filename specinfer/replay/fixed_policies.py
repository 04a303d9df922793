"""Policies that decide without learning: what others are compared with, and what a recorder looks on with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specinfer.plan import PlanEntry
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.tree import TokenTree
from specinfer.tree.prune import likeliest
from specinfer.tree.token_tree import single_node


class LookingOn(FixedPolicy):
    """Lets everybody guess as configured, and verifies nothing: every step adds one token."""

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The roots."""
        return [single_node(tree.token_ids[0]) for tree in trees]


class CutPolicy(FixedPolicy):
    """Some drafts, so many levels deep, and of what all guessed the likeliest nodes, so many a request."""

    def __init__(self, drafts: Collection[str], depth: int, nodes: int) -> None:
        """`nodes` are those of a tree, the root included; likely is what speculators themselves say."""
        self._drafts = frozenset(drafts)
        self._depth = depth
        self._nodes = nodes

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """All entries, of the drafts that take part."""
        return [speculator in self._drafts and self._depth > 0] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """All entries, until the trees are deep enough."""
        return [
            of_tree if max(tree.depths()) < self._depth else ()
            for tree, of_tree in zip(trees, ends, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The likeliest nodes of each tree, and those that have to stay."""
        return [likeliest(tree, tree.likelihoods(), self._nodes) for tree in trees]
