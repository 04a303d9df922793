"""Several trees below one root, as one tree (SpecInfer, definition 3.2); and trees without dead nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence

from specinfer.errors import IntegrityError
from specinfer.tree.draw import Draw, Runs, any_sampled, as_runs
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


def prune(
    tree: TokenTree, *, permits: Callable[[tuple[int, ...], int], bool] | None, ending: Container[int]
) -> TokenTree:
    """`tree` without what follows an ending token, and without tokens their own path forbids.

    What hangs below a dropped node goes with it. Nodes with a sampled draw are never dropped for their own
    value (docs/losslessness.md says why); below an ending token there is no law left to keep.

    Args:
        tree: the candidates; not mutated, and returned itself when nothing is dropped.
        permits: whether a token may follow the tokens of a path at all; None: everything may.
        ending: token ids after which no text follows.
    """
    firm = {draw.node for draw in tree.draws if sampled(draw)}
    paths: dict[int, tuple[int, ...]] = {0: ()}  # of the nodes that stay
    for node in range(1, tree.num_nodes):
        parent, token = tree.parents[node], tree.token_ids[node]
        if parent not in paths or (parent > 0 and tree.token_ids[parent] in ending):
            continue
        if permits is None or node in firm or permits(paths[parent], token):
            paths[node] = (*paths[parent], token)
    return keep(tree, paths)


def sampled(draw: Draw) -> bool:
    """Whether a draw may never be dropped for its value, as some verifier relies on how it was drawn."""
    return draw.rule.is_sampled


def firm_nodes(tree: TokenTree) -> set[int]:
    """The nodes that have to stay, whichever verifier the tree meets; others may be dropped for any reason.

    Those of sampled draws stay, those of the draws that have their turn before one below the same node, as
    that one is drawn without knowing what becomes of them, and those above all of these.
    """
    firm: set[int] = set()
    if not any_sampled(tree.draws):
        return firm
    drawn_below: set[int] = set()
    for draw in reversed(tree.draws):
        if sampled(draw):
            drawn_below.add(draw.parent)
        node = draw.node if draw.parent in drawn_below else 0
        while node and node not in firm:
            firm.add(node)
            node = tree.parents[node]
    return firm


def likeliest(tree: TokenTree, hopes: Sequence[float], most: int) -> TokenTree:
    """The tree's `most` likeliest nodes, the root and firm ones among them; of equal ones the earlier.

    `hopes` is how likely each node is to become text, [num_nodes]: none is likelier than its parent.
    """
    if tree.num_nodes <= most:
        return tree
    firm = firm_nodes(tree)
    firm.add(0)
    ranked = sorted(range(tree.num_nodes), key=lambda node: (node not in firm, -hopes[node]))
    return keep(tree, sorted(ranked[: max(most, len(firm))]))


def keep(tree: TokenTree, nodes: Collection[int]) -> TokenTree:
    """The subtree of `nodes`, ascending; it must hold the root and each node's parent."""
    if len(nodes) == tree.num_nodes:
        return tree
    tokens, parents = tree.token_ids, tree.parents
    new = [-1] * tree.num_nodes
    for number, node in enumerate(nodes):
        new[node] = number
    return TokenTree(
        tuple([tokens[node] for node in nodes]),
        (-1, *[new[parents[node]] for node in nodes if node]),
        Runs(as_runs(tree.draws).runs, new),
    )
