"""Data that server and engine processes exchange, and observers of completions.

Never imports torch, which the server process does not load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specinfer.engine.steps import Statistics
from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import SpeculationConfig


@dataclass(frozen=True, slots=True)
class Work:
    """One completion of a prompt, which an engine starts, or continues after another engine's tokens."""

    id: str  # unique; the server assigns it
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with a seed
    index: int = 0  # among the prompt's completions
    prior_output: tuple[int, ...] = ()  # output tokens of an earlier engine
    traced: bool = False  # whether deltas include each step's tree
    adapter: str | None = None  # name of its low-rank adapter


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Limits and identity that an engine process sends when it is ready."""

    max_context: int  # maximum of prompt and output tokens of a request
    max_length: int  # the same maximum, limited by the KV cache too
    speculators: tuple[str, ...] = ()  # that a request may select
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    summary: str = ""  # blocks, drafts, context, threads, memory and KV cache, as one line
    quantization: str = ""  # of the target
    fingerprint: str = ""  # engines with equal ones produce the same text for a request


class BackendError(Exception):
    """The engine died and no other can continue an answer; the message has the reason."""


class UnavailableError(BackendError):
    """The server cannot serve a valid request now; the client may retry."""


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """Health of one replica."""

    state: Statistics  # summed over its engines; the last known one if none answers
    restarts: int = 0
    trouble: str = ""  # reason that it takes no work now
    runs: bool = True  # whether an engine runs
    answers: bool = True  # whether it replied with its statistics

    @property
    def takes_work(self) -> bool:
        """True if there is no trouble."""
        return not self.trouble


@dataclass(frozen=True, slots=True)
class Health:
    """Health of all replicas together."""

    state: Statistics | None  # None if engines run but none answers
    restarts: int = 0
    trouble: str = ""  # reason that no replica takes work now
    replicas: tuple[ReplicaHealth, ...] = ()
    handed_on: int = 0  # times that a work moved from one engine to another


class CompletionObserver:
    """Receives the deltas of one completion; times are seconds of the monotonic clock.

    The server's event loop calls both methods, so neither may block.
    """

    def __init__(self, work: Work, arrived: float) -> None:
        self.work = work
        self.arrived = arrived
        self.first: float | None = None  # time of its first token
        self.tokens = 0
        self.cached_tokens = 0  # of the prompt
        self.finish_reason = FinishReason.ABORT  # until a delta has one

    def delta(self, delta: Delta, now: float) -> None:
        """Record a delta that arrived at `now`."""
        if delta.token_ids and self.first is None:
            self.first = now
        self.tokens += len(delta.token_ids)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def end(self, now: float) -> None:
        """Record the end: the last delta had a finish reason, or the client stopped reading."""


# Returns the observer of a completion that begins at the given time; `CALLER` holds its client.
Observe = Callable[[Work, float], CompletionObserver]
