"""Reports of an engine's steps: their times, its statistics, and verified trees for listeners.

Viewers of trees depend only on the JSON form of a TreeEvent, which is stable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from specinfer.tree.token_tree import TokenTree, proposed_by

if TYPE_CHECKING:  # a server imports this module before it loads anything large
    from specinfer.plan import StepPlan
    from specinfer.speculate.decision import Decision
    from specinfer.tokenizer import Tokenizer
    from specinfer.verify.coupled import Acceptance

_LOG = logging.getLogger(__name__)
_COUNTERS: Final = (  # fields of Statistics that only grow
    *("steps", "stage_seconds", "preemptions", "prefix_queries", "prefix_hits", "speculation_off_steps"),
    *("guessed_tokens", "failures", "unenforced", "streamed_bytes", "stream_wait_seconds", "rank_seconds"),
    "prompt_store",
)


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
    prompt_store: Mapping[str, int] = field(default_factory=dict)  # files and bytes of it, by event

    def since(self, earlier: Statistics) -> Statistics:
        """Return the counters since `earlier`, with the present state."""
        return self._with(earlier, -1)

    def after(self, earlier: Statistics) -> Statistics:
        """Return the sums of these counters and an earlier engine's, with the present state."""
        return self._with(earlier, 1)

    def _with(self, other: Statistics, sign: int) -> Statistics:
        sums: dict[str, Any] = {}
        for name in _COUNTERS:
            own, others = getattr(self, name), getattr(other, name)
            if isinstance(own, Mapping):
                sums[name] = {key: own.get(key, 0) + sign * others.get(key, 0) for key in {**others, **own}}
            else:
                sums[name] = own + sign * others
        return replace(self, **sums)


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


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """One request's tree in one step."""

    step: int
    request_id: str
    tree: TokenTree
    acceptance: Acceptance
    seconds: Mapping[str, float] = field(default_factory=dict)  # seconds of the step's stages so far
    decision: Decision | None = None  # the policy's reasons, if requested

    def to_json(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """Return the event as JSON values.

        `proposed_by[i]` has the speculators that drew node i, and `likelihoods[i]` their acceptance
        probability of it. With a tokenizer, `texts[i]` is the node's token as text and `next_text` that of
        the bonus token; `bytes` has, in hexadecimal by id, the bytes of tokens that are not whole characters.
        """
        return (self._texts(tokenizer) if tokenizer is not None else {}) | {
            "step": self.step,
            "request_id": self.request_id,
            "token_ids": list(self.tree.token_ids),
            "parents": list(self.tree.parents),
            "proposed_by": proposed_by(self.tree),
            "path": list(self.acceptance.path),
            "next_token": self.acceptance.next_token,
            "likelihoods": [round(likely, 6) for likely in self.tree.likelihoods()],
            "seconds": {stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
            **({} if self.decision is None else {"decision": self.decision.to_json()}),
        }

    def _texts(self, tokenizer: Tokenizer) -> dict[str, Any]:
        tokens = [*self.tree.token_ids, self.acceptance.next_token]
        *texts, last = map(tokenizer.text_of, tokens)
        parts = {
            str(token): tokenizer.token_bytes[token].hex()
            for token, text in zip(tokens, [*texts, last], strict=True)
            if "\ufffd" in text and not tokenizer.is_special(token)
        }
        return {"texts": texts, "next_text": last} | ({"bytes": parts} if parts else {})


class Listeners:
    """Callbacks that may be set at any time; LLM has their contracts."""

    def __init__(self) -> None:
        self.on_step: Callable[[Sequence[str]], None] | None = None
        self.on_tree: Callable[[TreeEvent], None] | None = None
        self.explains = False  # True if tree events include decisions
        self._on_step_failed = False  # True once its failure was logged

    def announce(self, plan: StepPlan) -> None:
        """Call `on_step` with the step's request ids; its first exception is logged, and steps continue."""
        if self.on_step is None:
            return
        try:
            self.on_step([entry.request.request_id for entry in plan.entries])
        except Exception:
            if not self._on_step_failed:
                _LOG.exception("on_step failed; steps continue, and later failures are not logged")
            self._on_step_failed = True

    def trace(self, event: TreeEvent) -> str | None:
        """Call `on_tree`; returns the text of its exception, which ends the request of the event."""
        assert self.on_tree is not None, "nobody listens"
        try:
            self.on_tree(event)
        except Exception as error:
            _LOG.exception("request %s ends, as on_tree failed", event.request_id)
            return f"on_tree failed: {error}"
        return None
