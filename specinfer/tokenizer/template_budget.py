"""Budget: what a chat template may do before it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, Final

import jinja2
from jinja2.utils import Namespace

MOST_STEPS: Final = 1_000_000  # about a second of them
MOST_SECONDS: Final = 10.0
OF_NODE: Final = 32  # what an object counts for that is no text
MOST_BITS: Final = 1 << 14  # of an integer
_SPARE: Final = 16 << 20  # characters that a template may make, whatever it is given
_TIMES: Final = 32  # and of each character that it is given


class BoundsError(jinja2.TemplateError):
    """A template does too much."""


class Budget(threading.local):
    """What a template may still do; each thread has a template of its own under way."""

    def __init__(self) -> None:
        self._steps = 0
        self._size = 0
        self._end = 0.0
        self._known: dict[int, int] = {}  # id -> weight of what it was given, which is not weighed again

    def begin(self, values: Iterable[object]) -> None:
        """Begin a template that is given these, of which lists are known with their items."""
        self._size, self._known = 1 << 62, {}
        known: dict[int, int] = {}
        for value in values:
            items = value if isinstance(value, list) else ()
            known |= {id(item): self.weigh(item) for item in items}
            known[id(value)] = sum(known[id(item)] for item in items) if items else self.weigh(value)
        self._known = known
        self._size = _SPARE + _TIMES * sum(known.values())
        self._steps, self._end = MOST_STEPS, time.monotonic() + MOST_SECONDS

    def step(self) -> None:
        """Count a step."""
        self._steps -= 1
        if self._steps < 0:
            raise BoundsError(f"it takes more than {MOST_STEPS} steps")
        if time.monotonic() > self._end:
            raise BoundsError(f"it takes more than {MOST_SECONDS:g} seconds")

    def ask(self, size: int) -> None:
        """Raise BoundsError where so many characters more are too many."""
        if size > self._size:
            raise BoundsError("it makes too long a text or list")

    def spend(self, size: int) -> None:
        """Count so many characters; raises BoundsError where they are too many."""
        self.ask(size)
        self._size -= size

    def made(self, value: Any) -> Any:
        """Count a value that was made, and return it."""
        size = 0
        if isinstance(value, (str, bytes)):
            size = len(value)
        elif isinstance(value, (list, tuple, dict, set)):
            size = OF_NODE * len(value)
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise BoundsError("it makes too large a number")
        self.spend(size)
        return value

    def weigh(self, value: Any) -> int:
        """How many characters a value has when it is written, about; raises BoundsError as `ask` does."""
        weight, left, known, most = 0, [value], self._known, self._size
        while left:
            one = left.pop()
            kind = type(one)
            if kind is str:
                weight += len(one)
            elif (told := known.get(id(one))) is not None:
                weight += told
            elif kind is int or kind is float or kind is bool:
                weight += OF_NODE
            elif kind is list or kind is tuple:
                weight += OF_NODE
                left += one
            elif isinstance(one, (str, bytes)):
                weight += len(one)
            else:
                weight += OF_NODE
                if kind is dict or isinstance(one, Mapping):
                    left += one.keys()
                    left += one.values()
                elif isinstance(one, Namespace):
                    left += object.__getattribute__(one, "_Namespace__attrs").values()
                elif isinstance(one, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                    left += one
            if weight > most:
                self.ask(weight)
        return weight
