"""Keeps callers below a number of requests per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """A bucket that fills at `rate` tokens a second up to `capacity`.

    A request takes one token or more. A full bucket lets `capacity` requests through at once, so
    `capacity` says how uneven the traffic may be and `rate` how much of it there may be.
    """

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError(f"rate is {rate}, expected a positive number")
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        self.rate = rate
        self.capacity = capacity
        self._clock = clock
        self._tokens = capacity
        self._filled_at = clock()
        self._lock = threading.Lock()

    def try_take(self, tokens: float = 1.0) -> bool:
        """Take tokens if there are enough."""
        with self._lock:
            self._fill()
            if self._tokens < tokens:
                return False
            self._tokens -= tokens
            return True

    def wait_time(self, tokens: float = 1.0) -> float:
        """Seconds until so many tokens are there; raises ValueError when they never will be."""
        if tokens > self.capacity:
            raise ValueError(f"{tokens} tokens do not fit a bucket with capacity {self.capacity}")
        with self._lock:
            self._fill()
            return max(tokens - self._tokens, 0.0) / self.rate

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._filled_at) * self.rate, self.capacity)
        self._filled_at = now


class PerClientLimiter:
    """One bucket for every client; buckets that are full again are dropped now and then."""

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def allow(self, client: str) -> bool:
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = TokenBucket(self._rate, self._capacity, self._clock)
            self._buckets[client] = bucket
        return bucket.try_take()

    def retry_after(self, client: str) -> float:
        bucket = self._buckets.get(client)
        return bucket.wait_time() if bucket else 0.0

    def prune(self) -> int:
        """Forget clients whose bucket holds its whole capacity; returns how many."""
        full = [name for name, bucket in self._buckets.items() if bucket.wait_time(self._capacity) == 0]
        for name in full:
            del self._buckets[name]
        return len(full)
