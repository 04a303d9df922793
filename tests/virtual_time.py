"""An event loop whose clock jumps to the next timer, so that sleeps take no time and end exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # without a timer the event comes from outside
            return super().select(None)
        self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` from second 0 and return its result; it must not wait for sockets."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
