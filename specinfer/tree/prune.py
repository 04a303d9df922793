"""A tree without the nodes that can never become text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence

from specinfer.tree.draw import Draw, Runs, any_sampled, as_runs
from specinfer.tree.token_tree import TokenTree


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
