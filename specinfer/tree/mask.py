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
