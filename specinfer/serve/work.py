"""Backend: whoever makes tokens for the server; the works it gets, and the deltas of their answers.

No torch here: the server's own process never loads it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specinfer.config import SpeculationConfig
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
class EngineFacts:
    """What an engine process says of itself when it is ready."""

    max_context: int  # prompt and output tokens of a request
    longest: int  # the same, with the KV cache counted
    pid: int
    speculators: tuple[str, ...] = ()  # whom a request may name
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


@dataclass(frozen=True, slots=True)
class EngineState:
    """How an engine is doing, as metrics have it; from `steps` to `guessed_tokens` all only grows."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    speculation_off_steps: int = 0
    guessed_tokens: Mapping[str, float] = field(default_factory=dict)
    speculation_on: bool = True
    cost_factors: Mapping[str, float] = field(default_factory=dict)

    def behind(self, earlier: EngineState) -> EngineState:
        """This state, with what engines before this one have counted."""
        return replace(
            self,
            steps=self.steps + earlier.steps,
            preemptions=self.preemptions + earlier.preemptions,
            prefix_queries=self.prefix_queries + earlier.prefix_queries,
            prefix_hits=self.prefix_hits + earlier.prefix_hits,
            stage_seconds=_added(earlier.stage_seconds, self.stage_seconds),
            speculation_off_steps=self.speculation_off_steps + earlier.speculation_off_steps,
            guessed_tokens=_added(earlier.guessed_tokens, self.guessed_tokens),
        )


def _added(counted: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Counts by name, added up."""
    return {**counted, **{name: counted.get(name, 0) + count for name, count in more.items()}}


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
