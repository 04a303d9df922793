"""Work: what an engine process is given to do, what it says of itself, and who observes its answers.

No torch here: the server's own process never loads it.
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
    """One completion of a prompt, as an engine needs it to begin, or to go on where another one stopped."""

    id: str  # of the server's making; no other work has it
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with a seed
    index: int = 0  # which of the prompt's completions
    said: tuple[int, ...] = ()  # output tokens that it has already
    traced: bool = False  # whether each step's tree is wanted
    adapter: str | None = None  # the name of a low-rank adapter that the model has for it


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine process says of itself when it is ready."""

    max_context: int  # prompt and output tokens of a request
    longest: int  # the same, with the KV cache counted
    speculators: tuple[str, ...] = ()  # whom a request may name
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    fingerprint: str = ""  # of all that texts depend on but requests: equal ones make the same texts


class BackendError(Exception):
    """The engine is gone, and an answer cannot go on; the message says why."""


class UnavailableError(BackendError):
    """An answer is not made now, through no fault of its request: the client may ask again."""


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """How one replica is."""

    state: Statistics  # of its engines all in all; where none answers, as it was told last
    restarts: int = 0
    trouble: str = ""  # why it does not take work now
    runs: bool = True  # an engine runs
    answers: bool = True  # and says how it is


@dataclass(frozen=True, slots=True)
class Health:
    """How all replicas are together."""

    state: Statistics | None  # None where engines run and none answers
    restarts: int = 0
    trouble: str = ""  # why no work is taken now
    replicas: tuple[ReplicaHealth, ...] = ()
    handed_on: int = 0  # how often a work that an engine had went to another engine


class CompletionObserver:
    """Hears of one completion while it is made; times are of the monotonic clock.

    Both methods are called on the server's event loop, so neither waits for anything.
    """

    def __init__(self, work: Work, begun: float) -> None:
        self.work = work
        self.begun = begun
        self.first: float | None = None  # when its first token came
        self.tokens = 0
        self.cached_tokens = 0  # of the prompt
        self.finish_reason = FinishReason.ABORT  # until another one is told

    def delta(self, delta: Delta, now: float) -> None:
        """Take in a delta that arrived now."""
        if delta.token_ids and self.first is None:
            self.first = now
        self.tokens += len(delta.token_ids)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def end(self, now: float) -> None:
        """Take note that nothing follows: the last delta had a finish reason, or nobody reads on."""


# The observer of a completion that begins at a time; `CALLER` is who asks for it.
Observe = Callable[[Work, float], CompletionObserver]
