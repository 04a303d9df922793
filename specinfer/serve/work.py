"""Backend: whoever makes tokens for the server; the works it gets, and the deltas of their answers.

No torch here: the server's own process never loads it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specinfer.config import SpeculationConfig
from specinfer.engine.steps import Statistics
from specinfer.request import Delta
from specinfer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """One completion of a prompt, as an engine needs it to begin, or to go on where another one stopped."""

    id: str  # of the server's making; no other work has it
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with a seed
    index: int = 0  # which of the prompt's completions
    said: tuple[int, ...] = ()  # output tokens that it has already
    traced: bool = False  # whether each step's tree is wanted


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine process says of itself when it is ready."""

    max_context: int  # prompt and output tokens of a request
    longest: int  # the same, with the KV cache counted
    pid: int
    speculators: tuple[str, ...] = ()  # whom a request may name
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


class BackendError(Exception):
    """The engine is gone, and an answer cannot go on; the message says why."""


class UnavailableError(BackendError):
    """An answer is not made now, through no fault of its request: the client may ask again."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a backend is."""

    ready: bool  # it takes work now
    facts: EngineInfo | None  # None before it was ready for the first time
    state: Statistics | None  # None where it does not answer
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


class CompletionObserver(Protocol):
    """Hears of one completion while it is made; times are of the monotonic clock.

    Both methods are called on the server's event loop, so neither waits for anything.
    """

    def delta(self, delta: Delta, now: float) -> None:
        """Take in a delta that arrived now."""
        ...

    def end(self, now: float) -> None:
        """Take note that nothing follows: the last delta had a finish reason, or nobody reads on."""
        ...


# The observer of a completion that begins at a time; `CALLER` is who asks for it.
Observe = Callable[[Work, float], CompletionObserver]
