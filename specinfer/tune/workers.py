"""Workers: parts of a training step at the same time, each by some of the cores.

Products of a step are of a few hundred rows and most of its time lies between them, so two cores that share
each of them are little quicker than one; two cores with half of the texts each are nearly twice as quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class Workers:
    """As many as there are cores to compute with, and no more than there can be parts."""

    def __init__(self, most: int) -> None:
        """`most` parts of a step; the cores are those that torch computes with now."""
        self._cores = torch.get_num_threads()
        self.count = max(1, min(most, self._cores))
        self._pool = ThreadPoolExecutor(self.count, "training") if self.count > 1 else None

    def map(self, work: Callable[[_Given], _Made], parts: Sequence[_Given]) -> list[_Made]:
        """What comes of each part, in their order; raises what the first of them that fails raises."""
        if self._pool is None:
            return [work(part) for part in parts]

        def alone(part: _Given) -> _Made:
            torch.set_num_threads(self._cores // self.count)  # of this thread
            return work(part)

        try:
            return list(self._pool.map(alone, parts))
        finally:
            torch.set_num_threads(self._cores)  # what threads begin with that compute for the first time
