"""A cache that forgets what was not used for the longest time."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps at most `capacity` values; safe to use from several threads."""

    def __init__(self, capacity: int, on_evict: Callable[[K, V], None] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._on_evict = on_evict
        self._lock = threading.Lock()

    def get(self, key: K, default: V | None = None) -> V | None:
        with self._lock:
            if key not in self._values:
                self.misses += 1
                return default
            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key]

    def get_many(self, keys: Iterable[K]) -> dict[K, V]:
        """Deprecated: call `get` for each key."""
        warnings.warn("get_many is deprecated, use get", DeprecationWarning, stacklevel=2)
        found: dict[K, V] = {}
        for key in keys:
            value = self.get(key)
            if value is not None:
                found[key] = value
        return found

    def put(self, key: K, value: V) -> None:
        evicted: tuple[K, V] | None = None
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self.capacity:
                evicted = self._values.popitem(last=False)
        if evicted is not None and self._on_evict is not None:
            self._on_evict(*evicted)

    def discard(self, key: K) -> None:
        with self._lock:
            self._values.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.hits = self.misses = 0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
