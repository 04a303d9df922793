"""Workers: parts of a training step at the same time, each by some of the cores.

Most of a step's time lies between its products, where cores that share them wait for each other; cores that
have texts of their own do not. Two were 1.3 times as quick as one by the former, and 1.4 by the latter
(docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
        """What comes of each part, in their order; raises what the first of them that fails raises.

        Each has its share of the cores. No part is under way any more when it returns or raises.
        """
        count = len(parts)
        if self._pool is None or count == 1:
            return [work(part) for part in parts]

        def alone(number: int) -> _Made:
            share = self._cores // count + (number < self._cores % count)
            torch.set_num_threads(max(1, share))  # of this thread
            return work(parts[number])

        futures = [self._pool.submit(alone, number) for number in range(count)]
        try:
            return [future.result() for future in futures]
        finally:
            wait(futures)
            torch.set_num_threads(self._cores)  # what threads begin with that compute for the first time
