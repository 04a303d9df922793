"""DeepThread: one thread with a deep stack, for what recurses as deep as its input is nested."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")
_stack_size = threading.Lock()  # Python has one stack size for all threads that start from now on


class DeepThread:
    """Runs calls one after the other on a thread of its own, with `stack` bytes of stack.

    The first call starts the thread. It ends with the process, after the call it is in: a thread that the
    process does not wait for may not come back from a library that gave up the interpreter's lock. A forked
    process starts one of its own. Safe to share by threads; a call must not make another one.
    """

    def __init__(self, name: str, stack: int) -> None:
        self._name = name
        self._stack = stack
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0  # whose thread it is

    def run(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns; raises what it raises, and RuntimeError when no thread can be started."""
        return self._started().submit(work).result()

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._process != os.getpid():
                executor = ThreadPoolExecutor(1, self._name)
                with _stack_size:
                    usual = threading.stack_size(self._stack)
                    try:
                        executor.submit(int)  # the first call starts the only thread
                    finally:
                        threading.stack_size(usual)
                self._executor, self._process = executor, os.getpid()
            return self._executor
