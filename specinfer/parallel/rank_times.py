"""RankTimes: where the time of ranks goes, which is computing, exchanging or waiting for others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from specinfer.kernels.exchange import SharedExchange

DOING: Final = ("computing", "exchanging", "waiting")
_EVERY: Final = 1.0  # seconds after which followers are asked for theirs


class RankTimes:
    """The account of one rank's passes; rank 0 has those of the others, too, as they have told them."""

    def __init__(self, exchange: SharedExchange | None) -> None:
        """`exchange` counts what goes through it by itself; of gloo nobody knows, so that is computing."""
        self.spent = [0.0] * len(DOING)  # seconds of passes
        self._exchange = exchange
        self._handing, self._waiting = 0.0, 0.0  # seconds in these
        self._told: list[Sequence[float]] = []  # by followers
        self._heard = -math.inf  # when

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A part of a pass, whose time counts."""
        began, before = time.perf_counter(), self._elsewhere()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            moved, waited = (now - then for now, then in zip(self._elsewhere(), before, strict=True))
            for n, spent in enumerate((seconds - moved - waited, moved, waited)):
                self.spent[n] += max(0.0, spent)  # these are of two clocks

    @contextmanager
    def handing(self) -> Iterator[None]:
        """While something is given to another rank, which is exchanging."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._handing += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While something is to come from another rank."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waiting += time.perf_counter() - began

    @property
    def due(self) -> bool:
        """Whether it is time to ask followers for theirs, at rank 0."""
        return time.monotonic() - self._heard > _EVERY

    def hear(self, told: list[Sequence[float]]) -> None:
        """Keep what followers have spent so far, in their order."""
        self._told = told
        self._heard = time.monotonic()

    @property
    def by_rank(self) -> dict[str, float]:
        """Seconds of all ranks so far, at rank 0: "1 waiting"; others were asked up to a few seconds ago."""
        return {
            f"{rank} {doing}": seconds
            for rank, spent in enumerate([self.spent, *self._told])
            for doing, seconds in zip(DOING, spent, strict=True)
        }

    def _elsewhere(self) -> tuple[float, float]:
        """Seconds in exchanges so far, without waiting, and of waiting."""
        if self._exchange is None:
            return self._handing, self._waiting
        figures = self._exchange.figures()
        return self._handing + figures.seconds - figures.waited, self._waiting + figures.waited
