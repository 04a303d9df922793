"""Data that server and engine processes exchange, and observers of completions.

Loading it never imports torch, which the server process does not load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.engine.steps import Statistics
from specinfer.progress import format_bytes
from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import SpeculationConfig

if TYPE_CHECKING:
    from specinfer.llm import LLM


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
    memory: int = 0  # bytes of its process with full caches


def info_of(llm: LLM) -> EngineInfo:
    """Limits and identity of an engine."""
    summary, memory = _summary(llm)
    return EngineInfo(
        llm.max_context,
        llm.intake.max_length,
        llm.intake.speculators,
        llm.config.speculation,
        summary,
        llm.config.kind,
        fingerprint(llm),
        memory,
    )


def _summary(llm: LLM) -> tuple[str, int]:
    """One line with the choices that were made for the engine and its memory, and this in bytes."""
    import torch

    from specinfer.runtime.kv_cache import bytes_per_block, process_bytes
    from specinfer.runtime.state_cache import state_bytes

    models, config = llm.models, llm.config
    target, positions = models.target, llm.intake.positions
    drafts = ", ".join(Path(draft).name for draft in config.speculation.drafts)
    kinds = {"none": str(target.dtype).removeprefix("torch."), "gguf": "blocks of the file"}
    library = target.kernels.library
    kind = "int8 KV cache" if target.kernels.int8_cache else "KV cache"
    caches = [(m.config, m.kernels.kv_dtype(m.dtype)) for m in (target, *models.drafts.values())]
    process, cache = process_bytes(), positions * bytes_per_block(caches, 1)
    parts = [
        kinds.get(config.quantization, config.quantization),
        f"draft {drafts}" if drafts else "no draft",
        f"context {llm.max_context}",
        f"{torch.get_num_threads() if library is None else library.threads()} threads",
        f"{format_bytes(process)} of memory",
        f"{kind} of {positions} tokens, up to {format_bytes(cache)} more",
    ]
    states = llm.states
    if size := state_bytes(caches, states):
        counts = f"{states.slots} requests and {states.checkpoints} checkpoints"
        parts.append(f"states of {counts}, up to {format_bytes(size)} more")
    if config.cache.prompt_store is not None:
        parts.append(f"prompt store {config.cache.prompt_store}")
    return "; ".join(parts), process + cache + size


def fingerprint(llm: LLM) -> str:
    """Hash that is equal for engines which produce the same text for the same work."""
    from specinfer.engine.fingerprint import engine_fingerprint

    return engine_fingerprint(llm.config, llm.models)


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

    @property
    def takes_work(self) -> bool:
        """True if there is no trouble."""
        return not self.trouble


@dataclass(frozen=True, slots=True)
class Health(ReplicaHealth):
    """Health of all replicas together; without trouble at least one takes work."""

    replicas: tuple[ReplicaHealth, ...] = ()
    handed_on: int = 0  # times that a work moved from one engine to another


@dataclass(eq=False)
class CompletionObserver:
    """Receives the deltas of one completion; times are seconds of the monotonic clock.

    The server's event loop calls both methods, so neither may block.
    """

    work: Work
    arrived: float
    first: float | None = field(default=None, init=False)  # time of its first token
    tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)  # of the prompt
    finish_reason: FinishReason = field(default=FinishReason.ABORT, init=False)  # until a delta has one

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
