"""Steps as a whole: where their time goes, what they did so far, and whose fault it is when they fail."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from itertools import chain
from typing import Final, TypeVar

from specinfer.plan import StepPlan

_Name = TypeVar("_Name", bound=str)
_Number = TypeVar("_Number", int, float)


class Stage(StrEnum):
    """The stages of a step."""

    SCHEDULE = "schedule"
    PROPOSE = "propose"  # speculators, their own model passes included
    FORWARD = "target_forward"  # tensors of the step and the target's pass, with the likeliest logits
    VERIFY = "verify"  # processed laws at the visited nodes, the walk, and logits that were unlikely
    COMMIT = "commit"  # KV moves, speculators' observe, detokenizing, bookkeeping


@dataclass(slots=True)
class StageClock:
    """Adds up seconds per stage; `lap(stage)` charges what passed since the last lap."""

    now: Callable[[], float] = time.perf_counter
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    steps: int = 0
    last: dict[str, float] = field(default_factory=dict)  # of the step that runs, or ran last
    _lapped: float = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.last = {}
        self._lapped = self.now()

    def lap(self, stage: Stage) -> None:
        """Charge the time since `start` or the last lap to `stage`."""
        now = self.now()
        took = now - self._lapped
        self.last[stage] = self.last.get(stage, 0.0) + took
        self.seconds[stage] += took
        self._lapped = now


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an engine did so far, which only grows, and how it is now."""

    steps: int = 0
    stage_seconds: dict[Stage, float] = field(default_factory=dict)
    preemptions: int = 0  # how often a request gave up its blocks to an older one
    prefix_queries: int = 0  # tokens of admitted texts that were looked up in the cache
    prefix_hits: int = 0  # tokens of these that were there
    running: int = 0  # requests in the batch
    waiting: int = 0  # requests for which there was no room yet
    kv_cache_usage: float = 0.0  # of the KV cache's blocks the part that running requests hold, 0 to 1
    speculation_off_steps: int = 0  # in which the guard let nobody guess
    cost_factors: Mapping[str, float] = field(default_factory=dict)  # what passes take, of what curves say
    speculation_on: bool = True  # the guard lets speculators guess, or there is none
    guessed_tokens: Mapping[str, int] = field(default_factory=dict)  # by speculator, verified or not
    streamed_bytes: int = 0  # of weights that were read from the disk for passes
    stream_wait_seconds: float = 0.0  # that passes waited for them
    # Where the time of ranks went: "1 computing" of rank 1, "1 exchanging" and "1 waiting".
    rank_seconds: Mapping[str, float] = field(default_factory=dict)

    def since(self, earlier: Statistics) -> Statistics:
        """What was done after `earlier`; what does not only grow is that of now."""
        return self._with(earlier, -1)

    def after(self, earlier: Statistics) -> Statistics:
        """What was done, with what an engine before this one did; what does not only grow is that of now."""
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
            streamed_bytes=self.streamed_bytes + sign * other.streamed_bytes,
            stream_wait_seconds=self.stream_wait_seconds + sign * other.stream_wait_seconds,
            rank_seconds=_sums(self.rank_seconds, other.rank_seconds, sign),
        )


def together(states: Sequence[Statistics]) -> Statistics:
    """What several engines did, and how they are: sums, the mean use of caches, the largest cost factors.

    Speculators may guess where they may in one of them.
    """
    total = reduce(Statistics.after, states)
    factors: dict[str, float] = {}
    for name, factor in chain.from_iterable(state.cost_factors.items() for state in states):
        factors[name] = max(factor, factors.get(name, 0.0))
    return replace(
        total,
        running=sum(state.running for state in states),
        waiting=sum(state.waiting for state in states),
        kv_cache_usage=sum(state.kv_cache_usage for state in states) / len(states),
        cost_factors=factors,
        speculation_on=any(state.speculation_on for state in states),
    )


def _sums(some: Mapping[_Name, _Number], others: Mapping[_Name, _Number], sign: int) -> dict[_Name, _Number]:
    """Counts by name, each with the other one of that name, or less it."""
    return {name: some.get(name, 0) + sign * others.get(name, 0) for name in {**others, **some}}


_PATIENCE: Final = 3  # failures, until requests are run alone to find out whose they are


class Suspects:
    """After a few failures in a row each request concerned runs alone, to see whose own step fails."""

    def __init__(self) -> None:
        self._failures = 0  # steps that raised, until some in a row have not
        self._good_steps = 0  # since then
        self._waiting: deque[str] = deque()  # requests to be run alone

    @property
    def failures(self) -> int:
        """The steps that failed of late."""
        return self._failures

    @property
    def next(self) -> str | None:
        """The request that has to run alone now."""
        return self._waiting[0] if self._waiting else None

    def acquit(self) -> None:
        """Suspect nobody until another step fails."""
        self._waiting.clear()

    def succeeded(self, plan: StepPlan, known: Collection[str]) -> None:
        """Forget failures after some steps that made tokens; the suspect that ran alone is cleared.

        `known` are the requests that have not ended.
        """
        came = plan.tree_entries or any(entry.ends_with_prompt for entry in plan.entries)
        if not self._failures or not came:  # a text that is read again may fail where it did
            return
        self._good_steps += 1
        if self._waiting:
            self._waiting.popleft()
            while self._waiting and self._waiting[0] not in known:
                self._waiting.popleft()
        elif self._good_steps >= _PATIENCE:
            self._failures = 0

    def failed(self, plan: StepPlan | None, known: Collection[str]) -> list[str]:
        """Count a step that failed; the request that is at fault, if it is known by now."""
        self._failures += 1
        self._good_steps = 0
        if self._failures < _PATIENCE:
            return []
        concerned = [entry.request.request_id for entry in plan.entries] if plan else [*self._waiting][:1]
        suspects = [name for name in concerned or known if name in known]
        self._waiting = deque(name for name in self._waiting if name not in suspects)
        if len(suspects) > 1:
            self._waiting = deque(suspects)
            return []
        if not self._waiting:
            self._failures = 0
        return suspects
