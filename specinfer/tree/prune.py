"""A tree without the nodes that can never become text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container

from specinfer.tree.token_tree import DrawRule, TokenTree

_ANY_VALUE = frozenset({DrawRule.POINT_MASS, DrawRule.COUPLED})


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
    sampled = {draw.node for draw in tree.draws if draw.rule not in _ANY_VALUE}
    paths: dict[int, tuple[int, ...]] = {0: ()}  # of the nodes that stay
    for node in range(1, tree.num_nodes):
        parent, token = tree.parents[node], tree.token_ids[node]
        if parent not in paths or (parent > 0 and tree.token_ids[parent] in ending):
            continue
        if permits is None or node in sampled or permits(paths[parent], token):
            paths[node] = (*paths[parent], token)
    return keep(tree, paths)


def prunable(tree: TokenTree) -> bool:
    """Whether any node may be dropped for its value, whichever verifier the tree meets: none was sampled."""
    return all(draw.rule in _ANY_VALUE for draw in tree.draws)


def keep(tree: TokenTree, nodes: Collection[int]) -> TokenTree:
    """The subtree of `nodes`, ascending; it must hold the root and each node's parent."""
    if len(nodes) == tree.num_nodes:
        return tree
    new = {old: i for i, old in enumerate(nodes)}
    return TokenTree(
        token_ids=tuple(tree.token_ids[old] for old in nodes),
        parents=tuple(new[tree.parents[old]] if old else -1 for old in nodes),
        draws=tuple(d.moved(new[d.parent], new[d.node]) for d in tree.draws if d.node in new),
    )
