"""Backend: whoever makes tokens for the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specinfer.serve.work import Delta, EngineFacts, EngineState, Work


class BackendError(Exception):
    """The engine is gone, and an answer cannot go on; the message says why."""


class UnavailableError(BackendError):
    """An answer is not made now, through no fault of its request: the client may ask again."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a backend is."""

    ready: bool  # it takes work now
    facts: EngineFacts | None  # None before it was ready for the first time
    state: EngineState | None  # None where it does not answer
    restarts: int = 0
    trouble: str = ""  # why it is not ready


class Backend(Protocol):
    """Four methods, called on the server's event loop."""

    def generate(self, works: Sequence[Work]) -> AsyncGenerator[Delta]:
        """The deltas of these works as they come, each one's last with a finish reason.

        Some say nothing: the first, when the work is admitted, and one when its first step begins.

        Of a reader that is slow, deltas of one work are put together. A generator that is closed aborts what
        is left. Raises BackendError when an answer cannot go on.
        """
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """End these works before the next step; nobody hears of them again."""
        ...

    def cut(self, reason: str) -> int:
        """End all answers with UnavailableError, which says why; returns how many there were."""
        ...

    async def health(self) -> Health:
        """How it is now; answers within a second, whatever happened to it."""
        ...
