"""RankTimes: the time that ranks spend computing, exchanging and waiting for others."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from specinfer.kernels.exchange import SharedExchange

DOING: Final = ("computing", "exchanging", "waiting")
_INTERVAL: Final = 1.0  # seconds between requests for the followers' times


class RankTimes:
    """Times of one rank's passes; rank 0 also has the followers' latest reports."""

    def __init__(self, exchange: SharedExchange | None) -> None:
        """`exchange` measures its own time; time in gloo cannot be separated, and counts as computing."""
        self.spent = [0.0] * len(DOING)  # seconds of passes
        self._exchange = exchange
        self._links = {"exchanging": 0.0, "waiting": 0.0}  # seconds at links to other ranks
        self._reported: list[Sequence[float]] = []  # followers' reports
        self._reported_at = -math.inf  # time of the last reports

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count the time of a part of a pass."""
        began, before = time.perf_counter(), self._elsewhere()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            moved, waited = (now - then for now, then in zip(self._elsewhere(), before, strict=True))
            for n, spent in enumerate((seconds - moved - waited, moved, waited)):
                self.spent[n] += max(0.0, spent)  # the times come from two clocks

    @contextmanager
    def counting(self, doing: Literal["exchanging", "waiting"]) -> Iterator[None]:
        """Count the time of sending to another rank, or of waiting for one."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._links[doing] += time.perf_counter() - began

    @property
    def due(self) -> bool:
        """True if rank 0 should request the followers' times."""
        return time.monotonic() - self._reported_at > _INTERVAL

    def record(self, times: list[Sequence[float]]) -> None:
        """Store the followers' times, in order of rank."""
        self._reported = times
        self._reported_at = time.monotonic()

    @property
    def by_rank(self) -> dict[str, float]:
        """Total seconds by rank and activity ("1 waiting"), at rank 0; followers' are a few seconds old."""
        return {
            f"{rank} {doing}": seconds
            for rank, spent in enumerate([self.spent, *self._reported])
            for doing, seconds in zip(DOING, spent, strict=True)
        }

    def _elsewhere(self) -> tuple[float, float]:
        """Total seconds exchanging, without waiting, and total seconds waiting."""
        moved, waited = self._links.values()
        if self._exchange is None:
            return moved, waited
        figures = self._exchange.figures()
        return moved + figures.seconds - figures.waited, waited + figures.waited
