"""Merge trees with one root (SpecInfer, definition 3.2), and remove nodes from trees."""

from collections.abc import Callable, Collection, Container, Sequence

from specinfer.errors import IntegrityError
from specinfer.tree.draw import Runs, any_sampled, as_runs
from specinfer.tree.token_tree import TokenTree, child_of


class MergedTree:
    """A tree into which others are merged: equal sequences share nodes, and all draws are kept in order.

    No two children of a node hold the same token. So below a node that a graft has added, its other nodes are
    new, and only nodes that existed before the graft need a look-up.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.token_ids = [*tree.token_ids]
        self.parents = [*tree.parents]
        self._runs = [*as_runs(tree.draws).runs]

    def graft(self, tree: TokenTree) -> None:
        """Add the sequences and draws of `tree`, which has the same root token. Mutates this tree."""
        nodes = [0]  # the node here of each node of `tree`
        self.place(tree, nodes, len(self.token_ids))
        self._runs += [run.moved(nodes) for run in as_runs(tree.draws).runs]

    def place(self, tree: TokenTree, nodes: list[int], before: int) -> None:
        """Extend `nodes`, the node here of each of the first nodes of `tree`, to all of its nodes.

        Adds the missing nodes. Nodes numbered `before` or higher come from `tree`, so their children need no
        look-up.
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
        """Return the merged tree."""
        return TokenTree(tuple(self.token_ids), tuple(self.parents), Runs(tuple(self._runs)))


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the tree with exactly the sequences of all `trees`, and with all of their draws.

    The draws keep the order of `trees`, then their order within each. Raises IntegrityError if the root
    tokens differ.
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
    """Return `tree` without descendants of ending tokens and without tokens that their path forbids.

    A removed node's descendants are removed with it. A node with a sampled draw is never removed for its own
    value (docs/losslessness.md has the reason). Below an ending token it may be, as no text follows there.

    Args:
        tree: the candidates; not mutated, and returned itself if nothing is removed.
        permits: returns whether a token may follow the tokens of a path; None: any token may.
        ending: token ids that end the text.
    """
    pinned = {draw.node for draw in tree.draws if draw.rule.is_sampled}
    paths: dict[int, tuple[int, ...]] = {0: ()}  # of the kept nodes
    for node in range(1, tree.num_nodes):
        parent, token = tree.parents[node], tree.token_ids[node]
        if parent not in paths or (parent > 0 and tree.token_ids[parent] in ending):
            continue
        if permits is None or node in pinned or permits(paths[parent], token):
            paths[node] = (*paths[parent], token)
    return keep(tree, paths)


def pinned_nodes(tree: TokenTree) -> set[int]:
    """Return the nodes that may not be removed under any verifier; others may be, for any reason.

    These are the nodes of sampled draws, the nodes of draws before a sampled one below the same parent, and
    the ancestors of all of these. A sampled draw may not depend on the fate of earlier draws.
    """
    pinned: set[int] = set()
    if not any_sampled(tree.draws):
        return pinned
    drawn_below: set[int] = set()
    for draw in reversed(tree.draws):
        if draw.rule.is_sampled:
            drawn_below.add(draw.parent)
        node = draw.node if draw.parent in drawn_below else 0
        while node and node not in pinned:
            pinned.add(node)
            node = tree.parents[node]
    return pinned


def likeliest(tree: TokenTree, probabilities: Sequence[float], max_nodes: int) -> TokenTree:
    """Return the tree of the `max_nodes` likeliest nodes; ties keep the earlier node.

    The root and pinned nodes are always kept. `probabilities` are the acceptance probabilities of the nodes,
    [num_nodes]; no node may be likelier than its parent.
    """
    if tree.num_nodes <= max_nodes:
        return tree
    pinned = pinned_nodes(tree)
    pinned.add(0)
    ranked = sorted(range(tree.num_nodes), key=lambda node: (node not in pinned, -probabilities[node]))
    return keep(tree, sorted(ranked[: max(max_nodes, len(pinned))]))


def keep(tree: TokenTree, nodes: Collection[int]) -> TokenTree:
    """Return the subtree of `nodes`, which ascend and include the root and each node's parent."""
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
