"""Where the time of the steps goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


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

    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    steps: int = 0
    last: dict[str, float] = field(default_factory=dict)  # of the step that runs, or ran last
    _lapped: float = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.last = {}
        self._lapped = time.perf_counter()

    def lap(self, stage: Stage) -> None:
        """Charge the time since `start` or the last lap to `stage`."""
        now = time.perf_counter()
        took = now - self._lapped
        self.last[stage] = self.last.get(stage, 0.0) + took
        self.seconds[stage] += took
        self._lapped = now


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an engine did so far, which only grows, and how it is now."""

    steps: int
    stage_seconds: dict[Stage, float]
    preemptions: int  # how often a request gave up its blocks to an older one
    prefix_queries: int  # tokens of admitted texts that were looked up in the cache
    prefix_hits: int  # tokens of these that were there
    running: int  # requests in the batch
    waiting: int  # requests for which there was no room yet
    kv_cache_usage: float  # of the KV cache's blocks the part that running requests hold, 0 to 1
    speculation_off_steps: int = 0  # in which the guard let nobody guess
    cost_factors: Mapping[str, float] = field(default_factory=dict)  # what passes take, of what curves say
    speculation_on: bool = True  # the guard lets speculators guess, or there is none
    guessed_tokens: Mapping[str, int] = field(default_factory=dict)  # by speculator, verified or not

    def since(self, earlier: Statistics) -> Statistics:
        """What was done after `earlier`; what does not only grow is that of now."""
        return replace(
            self,
            steps=self.steps - earlier.steps,
            stage_seconds={s: t - earlier.stage_seconds[s] for s, t in self.stage_seconds.items()},
            preemptions=self.preemptions - earlier.preemptions,
            prefix_queries=self.prefix_queries - earlier.prefix_queries,
            prefix_hits=self.prefix_hits - earlier.prefix_hits,
            speculation_off_steps=self.speculation_off_steps - earlier.speculation_off_steps,
            guessed_tokens={s: n - earlier.guessed_tokens.get(s, 0) for s, n in self.guessed_tokens.items()},
        )
