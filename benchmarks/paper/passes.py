"""Passes over trees and sequences of guesses, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Final

import numpy as np

from specinfer.kernels.choice import Kernels
from specinfer.kernels.structures import STAGES
from specinfer.models.language_model import LanguageModel
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner

BLOCK: Final = 16  # cache positions


def binary(nodes: int) -> list[int]:
    """Return the parents of a binary tree."""
    return [-1, *((node - 1) // 2 for node in range(1, nodes))]


def expanded(widths: Sequence[int]) -> list[int]:
    """Return the parents of an expansion's tree, level by level."""
    parents, level = [-1], [0]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return parents


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the nodes from the root to each leaf."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        found.append(path)
    return found


def tree_rows(start: int, table: Sequence[int], parents: Sequence[int]) -> Rows:
    """Return the rows of a tree behind `start` cached tokens, all with logits."""
    return Rows([0] * len(parents), start, table, 0, parents)


def filled_runner(target: LanguageModel, blocks: int) -> ModelRunner:
    """Return a runner with random K and V in all blocks of its cache."""
    runner = ModelRunner(target, num_blocks=blocks, block_size=BLOCK)
    for kept in (*runner.cache.keys, *runner.cache.values):
        kept.normal_()  # pages of zeros would all be one page
    return runner


def medians(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; all are called in turn, first without measuring."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(found[1:]) for name, found in seconds.items()}


@contextmanager
def profiled(kernels: Kernels) -> Iterator[dict[str, int]]:
    """Nanoseconds per stage of native calls inside the block, filled in at its end.

    Empty for PyTorch's kernels. Reading the clock takes about 50 ns per stage.
    """
    found: dict[str, int] = {}
    if kernels.library is None:
        yield found
        return
    nanoseconds = np.zeros(len(STAGES), dtype=np.int64)
    kernels.library.profile(1, nanoseconds.ctypes.data)
    try:
        yield found
    finally:
        kernels.library.profile(0, nanoseconds.ctypes.data)
        found.update(zip(STAGES, nanoseconds.tolist(), strict=True))
