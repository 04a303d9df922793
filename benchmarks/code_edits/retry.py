"""Calls that may fail now and succeed a little later."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class GaveUp(Exception):
    """Every attempt failed; the last failure is the cause."""

    def __init__(self, name: str, attempts: int) -> None:
        super().__init__(f"{name} failed {attempts} times")
        self.attempts = attempts


def pause_before(attempt: int, base: float, longest: float) -> float:
    """Seconds to wait before an attempt; the first attempt has number 0 and waits for nothing."""
    if attempt == 0:
        return 0.0
    return min(base, longest)


def retry(
    *errors: type[Exception],
    attempts: int = 4,
    base: float = 0.5,
    longest: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Call the decorated function again when it raises one of `errors`."""
    if attempts < 1:
        raise ValueError(f"attempts is {attempts}, expected at least 1")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            last: Exception | None = None
            for attempt in range(attempts):
                pause = pause_before(attempt, base, longest)
                if pause:
                    sleep(pause)
                try:
                    return function(*args, **kwargs)
                except errors as error:
                    last = error
                    logger.info("%s failed (attempt %d): %s", function.__name__, attempt + 1, error)
            raise GaveUp(function.__name__, attempts) from last

        return call

    return decorate


@retry(ConnectionError, TimeoutError, attempts=3)
def ping(check: Callable[[], bool]) -> bool:
    """Whether the other side answers."""
    if not check():
        raise ConnectionError("no answer")
    return True
