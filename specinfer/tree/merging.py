"""Several trees below one root, as one tree (SpecInfer, definition 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.errors import IntegrityError
from specinfer.tree.draw import Runs, as_runs
from specinfer.tree.token_tree import TokenTree, child_of


class MergedTree:
    """A tree that others are merged into: sequences they share are there once, draws are all kept, in order.

    A child of a node that another tree has brought is new, as no two children of a node hold the same token.
    So tokens are looked up below nodes that were there before, and nowhere else.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.token_ids = [*tree.token_ids]
        self.parents = [*tree.parents]
        self._runs = [*as_runs(tree.draws).runs]

    def graft(self, tree: TokenTree, below: int = 0) -> None:
        """Add all sequences of `tree` and its draws; node `below` holds its root's token."""
        nodes = [below]  # by node of `tree`
        self.place(tree, nodes, len(self.token_ids))
        self._runs += [run.moved(nodes) for run in as_runs(tree.draws).runs]

    def place(self, tree: TokenTree, nodes: list[int], before: int) -> None:
        """Add to `nodes`, where the first nodes of `tree` are here, where its others are; adds those missing.

        Nodes from `before` on are of this tree: none of its children is looked up below them.
        """
        token_ids, parents, known = self.token_ids, self.parents, frozenset(self.token_ids[1:before])
        first = len(nodes)
        for parent, token in zip(tree.parents[first:], tree.token_ids[first:], strict=True):
            above = nodes[parent]
            node = child_of(token_ids, parents, above, token) if above < before and token in known else None
            if node is None:
                node = len(token_ids)
                token_ids.append(token)
                parents.append(above)
            nodes.append(node)

    def build(self) -> TokenTree:
        """The tree as it stands."""
        return TokenTree(tuple(self.token_ids), tuple(self.parents), Runs(tuple(self._runs)))


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The tree that holds exactly the sequences of all `trees`, with all draws.

    The draws keep the order of `trees`, then their order within each. Raises IntegrityError when the
    trees do not share one root token.
    """
    roots = {tree.token_ids[0] for tree in trees}
    if len(roots) != 1:
        raise IntegrityError(f"trees to merge must share one root token, got {sorted(roots)}")
    if len(trees) == 1:
        return trees[0]
    merged = MergedTree(trees[0])
    for tree in trees[1:]:
        merged.graft(tree)
    return merged.build()
