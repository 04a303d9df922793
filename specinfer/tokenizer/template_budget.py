"""Budget: limits of a chat template on steps, seconds and produced characters."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, Final

import jinja2
from jinja2.utils import Namespace

MAX_STEPS: Final = 1_000_000  # take about a second
MAX_SECONDS: Final = 10.0
NODE_WEIGHT: Final = 32  # weight of an object other than text, in characters
MAX_BITS: Final = 1 << 14  # per integer
_BASE_SIZE: Final = 16 << 20  # characters that any template may produce
_SIZE_PER_INPUT: Final = 32  # characters that a template may produce in addition, per input character


class BoundsError(jinja2.TemplateError):
    """A template exceeds its limits."""


class Budget(threading.local):
    """Remaining limits of the running template; one per thread."""

    def __init__(self) -> None:
        self._steps = 0
        self._size = 0
        self._end = 0.0
        self._known: dict[int, int] = {}  # id -> weight of inputs, which are weighed once

    def begin(self, values: Iterable[object]) -> None:
        """Start the limits of a template with these inputs; items of input lists are weighed individually."""
        self._size, self._known = 1 << 62, {}
        known: dict[int, int] = {}
        for value in values:
            items = value if isinstance(value, list) else ()
            known |= {id(item): self.weigh(item) for item in items}
            known[id(value)] = sum(known[id(item)] for item in items) if items else self.weigh(value)
        self._known = known
        self._size = _BASE_SIZE + _SIZE_PER_INPUT * sum(known.values())
        self._steps, self._end = MAX_STEPS, time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count a step; raises BoundsError if there were too many, or if the time is over."""
        self._steps -= 1
        if self._steps < 0:
            raise BoundsError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._end:
            raise BoundsError(f"it takes more than {MAX_SECONDS:g} seconds")

    def check_size(self, size: int) -> None:
        """Raise BoundsError if `size` more characters exceed the limit."""
        if size > self._size:
            raise BoundsError("it makes too long a text or list")

    def spend(self, size: int) -> None:
        """Count `size` produced characters; raises BoundsError if they exceed the limit."""
        self.check_size(size)
        self._size -= size

    def made(self, value: Any) -> Any:
        """Count a produced value, and return it."""
        size = 0
        if isinstance(value, (str, bytes)):
            size = len(value)
        elif isinstance(value, (list, tuple, dict, set)):
            size = NODE_WEIGHT * len(value)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise BoundsError("it makes too large a number")
        self.spend(size)
        return value

    def weigh(self, value: Any) -> int:
        """Approximate number of characters of a value as text; raises BoundsError if above the limit."""
        weight, left, known, limit = 0, [value], self._known, self._size
        while left:
            one = left.pop()
            kind = type(one)
            if kind is str:
                weight += len(one)
            elif (weighed := known.get(id(one))) is not None:
                weight += weighed
            elif kind is int or kind is float or kind is bool:
                weight += NODE_WEIGHT
            elif kind is list or kind is tuple:
                weight += NODE_WEIGHT
                left += one
            elif isinstance(one, (str, bytes)):
                weight += len(one)
            else:
                weight += NODE_WEIGHT
                if kind is dict or isinstance(one, Mapping):
                    left += one.keys()
                    left += one.values()
                elif isinstance(one, Namespace):
                    left += object.__getattribute__(one, "_Namespace__attrs").values()
                elif isinstance(one, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                    left += one
            if weight > limit:
                self.check_size(weight)
        return weight
