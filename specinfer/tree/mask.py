"""Who sees whom in a tree: a node sees itself and its ancestors, nothing else (SpecInfer, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def ancestor_matrix(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[num_nodes, num_nodes]: entry (i, j) says whether j is i itself or one of its ancestors."""
    num_nodes = len(parents)
    sees = np.eye(num_nodes, dtype=np.bool_)
    for node in range(1, num_nodes):
        sees[node] |= sees[parents[node]]
    return sees


def chain_then_tree(chain: int, parents: Sequence[int]) -> NDArray[np.bool_]:
    """[chain + n, chain + n]: `chain` tokens in a row, the last of them the tree's root, then its nodes.

    `chain` counts the root, so with chain == 1 this is `ancestor_matrix(parents)`.
    """
    before = chain - 1
    if before == 0:
        return ancestor_matrix(parents)
    rows = before + len(parents)
    sees = np.zeros((rows, rows), dtype=np.bool_)
    sees[:before, :before] = np.tri(before, dtype=np.bool_)
    sees[before:, :before] = True
    sees[before:, before:] = ancestor_matrix(parents)
    return sees
