"""Readable texts and trees: each letter is a token."""

from __future__ import annotations

from specinfer.tree import TokenTree


def letters(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [ord(c) for c in text]


def spelled(tree: TokenTree) -> list[str]:
    """Return the leaves' texts below the root, in order of proposal."""
    tree.check_integrity()
    inner = set(tree.parents)
    leaves = [node for node in range(1, tree.num_nodes) if node not in inner]
    return ["".join(map(chr, tree.path_tokens(node))) for node in leaves]
