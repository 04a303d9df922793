"""Timing and statistics of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from itertools import chain
from typing import TypeVar

_Name = TypeVar("_Name", bound=str)
_Number = TypeVar("_Number", int, float)


class Stage(StrEnum):
    """The stages of a step."""

    SCHEDULE = "schedule"
    PROPOSE = "propose"  # speculators, including their models' passes
    FORWARD = "target_forward"  # preparing and running the target's pass, with its likeliest logits
    VERIFY = "verify"  # processed distributions at the visited nodes, and verification
    COMMIT = "commit"  # log-probabilities, KV moves, speculators' observe, detokenizing, bookkeeping


@dataclass(slots=True)
class StageClock:
    """Sums of seconds per stage; `lap(stage)` charges the time since the last lap."""

    now: Callable[[], float] = time.perf_counter
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    steps: int = 0
    last: dict[str, float] = field(default_factory=dict)  # seconds of the present or last step
    _lapped: float = 0.0
    _began: float | None = None  # time at which the running step began

    def start(self) -> None:
        """Start a step."""
        self.steps += 1
        self.last = {}
        self._began = self._lapped = self.now()

    def end(self) -> None:
        """End the step."""
        self._began = None

    @property
    def age(self) -> float:
        """Seconds since the running step began, 0 if none runs; readable from any thread."""
        began = self._began
        return 0.0 if began is None else self.now() - began

    def lap(self, stage: Stage) -> None:
        """Charge the time since `start` or the last lap to `stage`."""
        now = self.now()
        took = now - self._lapped
        self.last[stage] = self.last.get(stage, 0.0) + took
        self.seconds[stage] += took
        self._lapped = now


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of an engine, which only grow, and its present state."""

    steps: int = 0
    step_seconds: float = 0.0  # age of the running step; 0 if none runs
    stage_seconds: dict[Stage, float] = field(default_factory=dict)
    preemptions: int = 0  # preemptions of requests
    prefix_queries: int = 0  # tokens looked up in the cache
    prefix_hits: int = 0  # tokens found there
    running: int = 0  # requests in the batch
    waiting: int = 0  # requests in the queue
    kv_cache_usage: float = 0.0  # part of the blocks that running requests own, from 0 to 1
    speculation_off_steps: int = 0  # steps in which the guard kept speculation off
    # Measured time of passes relative to their curves.
    cost_factors: Mapping[str, float] = field(default_factory=dict)
    speculation_on: bool = True  # True if the guard has speculation on, or there is no guard
    guessed_tokens: Mapping[str, int] = field(default_factory=dict)  # by speculator, verified or not
    failures: Mapping[str, int] = field(default_factory=dict)  # exceptions of speculators and "policy"
    speculators_paused: int = 0  # of these, those that pause now
    # Requests by keyword of JSON schemas that their form is enforced without.
    unenforced: Mapping[str, int] = field(default_factory=dict)
    streamed_bytes: int = 0  # bytes of weights read from the disk for passes
    stream_wait_seconds: float = 0.0  # seconds that passes waited for them
    # Seconds of ranks by activity, such as "1 computing", "1 exchanging" and "1 waiting" for rank 1.
    rank_seconds: Mapping[str, float] = field(default_factory=dict)

    def since(self, earlier: Statistics) -> Statistics:
        """Return the counters since `earlier`, with the present state."""
        return self._with(earlier, -1)

    def after(self, earlier: Statistics) -> Statistics:
        """Return the sums of these counters and an earlier engine's, with the present state."""
        return self._with(earlier, 1)

    def _with(self, other: Statistics, sign: int) -> Statistics:
        return replace(
            self,
            steps=self.steps + sign * other.steps,
            stage_seconds=_sums(self.stage_seconds, other.stage_seconds, sign),
            preemptions=self.preemptions + sign * other.preemptions,
            prefix_queries=self.prefix_queries + sign * other.prefix_queries,
            prefix_hits=self.prefix_hits + sign * other.prefix_hits,
            speculation_off_steps=self.speculation_off_steps + sign * other.speculation_off_steps,
            guessed_tokens=_sums(self.guessed_tokens, other.guessed_tokens, sign),
            failures=_sums(self.failures, other.failures, sign),
            unenforced=_sums(self.unenforced, other.unenforced, sign),
            streamed_bytes=self.streamed_bytes + sign * other.streamed_bytes,
            stream_wait_seconds=self.stream_wait_seconds + sign * other.stream_wait_seconds,
            rank_seconds=_sums(self.rank_seconds, other.rank_seconds, sign),
        )


def combined(states: Sequence[Statistics]) -> Statistics:
    """Combine several engines: sums of counters, mean use of caches, largest cost factors.

    Speculation is on if it is on in one of them.
    """
    total = reduce(Statistics.after, states)
    factors: dict[str, float] = {}
    for name, factor in chain.from_iterable(state.cost_factors.items() for state in states):
        factors[name] = max(factor, factors.get(name, 0.0))
    return replace(
        total,
        running=sum(state.running for state in states),
        waiting=sum(state.waiting for state in states),
        speculators_paused=sum(state.speculators_paused for state in states),
        step_seconds=max(state.step_seconds for state in states),
        kv_cache_usage=sum(state.kv_cache_usage for state in states) / len(states),
        cost_factors=factors,
        speculation_on=any(state.speculation_on for state in states),
    )


def _sums(some: Mapping[_Name, _Number], others: Mapping[_Name, _Number], sign: int) -> dict[_Name, _Number]:
    """Add the counters of `others`, times `sign`, to those of the same names."""
    return {name: some.get(name, 0) + sign * others.get(name, 0) for name in {**others, **some}}
