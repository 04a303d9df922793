"""Backend: whoever makes tokens for the server; the works it gets, and the deltas of their answers.

No torch here: the server's own process never loads it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from specinfer.config import SpeculationConfig
from specinfer.request import FinishReason, Logprobs, SpeculationFigures
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
class Delta:
    """What an answer has gained since its last delta."""

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()  # stop and end-of-text tokens included
    logprobs: tuple[Logprobs, ...] = ()  # of these tokens, where asked for
    trees: tuple[Mapping[str, Any], ...] = ()  # of these steps, where asked for: `TreeEvent.to_json`
    steps: tuple[tuple[int, int], ...] = ()  # of these steps, drafted and accepted tokens
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None  # the stop string that ended it
    error: str | None = None  # why it ended, where finish_reason is "error"
    parameter: str | None = None  # at fault, where the engine refused the work
    internal_error: bool = False  # the engine's or the model's, and not the request's own
    figures: SpeculationFigures | None = None  # of the whole answer, with its end
    prompt_logprobs: Sequence[Logprobs | None] | None = None  # with the first token, or without one
    cached_tokens: int = 0  # of the prompt
    begun: bool = False  # whether its first step begins

    @property
    def is_empty(self) -> bool:
        """Whether it adds nothing to the answer: it says that the work is admitted, or that it begins."""
        told = self.token_ids or self.text or self.trees or self.finish_reason or self.prompt_logprobs
        return not told

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """One or more deltas of an answer, in order, as one."""
        if len(deltas) == 1:
            return deltas[0]
        reports = [one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None]
        return replace(
            deltas[-1],
            text="".join([one.text for one in deltas]),
            token_ids=tuple(chain.from_iterable([one.token_ids for one in deltas])),
            logprobs=tuple(chain.from_iterable([one.logprobs for one in deltas])),
            trees=tuple(chain.from_iterable([one.trees for one in deltas])),
            steps=tuple(chain.from_iterable([one.steps for one in deltas])),
            prompt_logprobs=reports[0] if reports else None,
            cached_tokens=max(one.cached_tokens for one in deltas),  # none behind a restart
            begun=any(one.begun for one in deltas),
        )


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
