"""Metrics: what the server counts, under the names that vLLM's dashboards know, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specinfer.engine.steps import Statistics
from specinfer.request import Delta, SpeculationFigures
from specinfer.serve.backend.work import CompletionObserver, Health, ReplicaHealth, Work
from specinfer.speculation_config import OLD_NAMES

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)
# A doubling each: whatever the machine, the error of a quantile read from them is the same.
_SHORT: Final = tuple(0.001 * 2.0**i for i in range(14))  # 1 ms to 8 s
_LONG: Final = tuple(0.01 * 2.0**i for i in range(16))  # 10 ms to 5 minutes
_TOKENS: Final = tuple(2.0**i for i in range(18))

# Of each replica: the metric's name, what it is, and where it stands.
_OF_REPLICA: Final[Sequence[tuple[str, str, Callable[[ReplicaHealth], float]]]] = (
    ("up", "Whether a replica takes work, 1 or 0.", lambda one: not one.trouble),
    ("requests_running", "Requests in its batch.", lambda one: one.state.running),
    ("requests_waiting", "Requests it has no room for yet.", lambda one: one.state.waiting),
    (
        "kv_cache_usage_perc",
        "Of its cache's blocks the part in use, 0 to 1.",
        lambda one: one.state.kv_cache_usage,
    ),
    (
        "prefix_queries",
        "Prompt tokens that were looked up in its cache.",
        lambda one: one.state.prefix_queries,
    ),
    ("prefix_hits", "Of these tokens those found.", lambda one: one.state.prefix_hits),
    ("engine_steps", "Steps of its engines.", lambda one: one.state.steps),
    ("restarts", "How often its engine was started again.", lambda one: one.restarts),
)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.model = model  # its name
        self._told = Statistics()  # of the engines, when they were asked last
        self._told_of: dict[int, Statistics] = {}  # the same of each replica

        def made(kind: type[_Kind], name: str, purpose: str, *labels: str, **more: Any) -> _Kind:
            names = ["model_name", *labels]
            return kind(f"specinfer:{name}", purpose, names, registry=self.registry, **more)

        # Of those without another label there is one series each, which is looked up once.
        def counter(name: str, purpose: str) -> Counter:
            return made(Counter, name, purpose).labels(model)

        def gauge(name: str, purpose: str) -> Gauge:
            return made(Gauge, name, purpose).labels(model)

        def histogram(name: str, purpose: str, buckets: tuple[float, ...]) -> Histogram:
            return made(Histogram, name, purpose, buckets=buckets).labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = counter("generation_tokens", "Tokens of answers.")
        self.success = made(Counter, "request_success", "Requests that ended.", "finished_reason")
        self.drafts = counter("spec_decode_num_drafts", "Trees that were verified.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Guessed tokens that were verified.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Guessed tokens that became text.")
        per_depth = "spec_decode_num_accepted_tokens_per_pos"
        self.accepted_at = made(Counter, per_depth, "The same by depth in the tree, from 0.", "position")
        self.accepted_by = made(Counter, "accepted_tokens", "The same by speculator.", "speculator")
        self.verified_by = made(Counter, "verified_tokens", "Verified tokens by speculator.", "speculator")
        self.traffic_log_lost = counter("traffic_log_lost", "Completions that log_traffic has not got.")
        self.preemptions = gauge("num_preemptions", "How often a request gave up its KV blocks.")
        self.steps = gauge("engine_steps", "Steps of the engine, restarts or not.")
        self.stages = made(Gauge, "engine_stage_seconds", "Where their time went, by stage.", "stage")
        self.off_steps = gauge("speculation_off_steps", "Of these steps those in which nobody could guess.")
        self.on = gauge("speculation_on", "Whether speculators may guess now, 1, or the guard forbids it, 0.")
        guessed = "Tokens that were guessed in these steps, verified or not, by speculator."
        self.guessed_by = made(Gauge, "guessed_tokens", guessed, "speculator")
        factor = "What a model's passes take now, of what its cost curve says."
        self.factors = made(Gauge, "pass_cost_factor", factor, "model")
        self.streamed_bytes = counter("streamed_bytes", "Of weights that were read from the disk for passes.")
        self.stream_waits = counter("stream_wait_seconds", "That passes waited for these bytes.")
        ranks = "Where the time of ranks went: computing, exchanging or waiting for others."
        self.ranks = made(Counter, "rank_seconds", ranks, "replica", "rank", "doing")
        self.restarts = gauge("engine_restarts", "How often engine processes were started again.")
        self.handed_on = gauge("num_handed_on", "How often an answer went on with another engine.")
        self._of_replicas = [
            (made(Gauge, f"replica_{name}", purpose, "replica"), value)
            for name, purpose, value in _OF_REPLICA
        ]
        self.running = gauge("num_requests_running", "Requests in the engine's batch.")
        self.waiting = gauge("num_requests_waiting", "Requests the engine has no room for yet.")
        self.cache = gauge("kv_cache_usage_perc", "Of the KV cache's blocks the part in use, 0 to 1.")
        self.hit_rate = gauge("prefix_cache_hit_rate", "Of looked up prompt tokens the part found, 0 to 1.")
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.", _LONG)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self.between = histogram("inter_token_latency_seconds", "Between two deltas, by token.", _SHORT)
        self.per_token = histogram(
            "time_per_output_token_seconds", "Of an answer, after its first token.", _SHORT
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", _LONG)
        self.prompt_length = histogram("request_prompt_tokens", "Of each request.", _TOKENS)
        self.answer_length = histogram("request_generation_tokens", "Of each answer.", _TOKENS)

    def observe(self, work: Work, now: float) -> Observed:
        """Count a completion that begins."""
        prompt_tokens = len(work.prompt_token_ids)
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_length.observe(prompt_tokens)
        return Observed(work, now, self)

    def text(self, health: Health) -> bytes:
        """All of it as Prometheus reads it, with the engine's state as it is."""
        state = health.state
        self.restarts.set(health.restarts)
        self.handed_on.set(health.handed_on)
        for number, replica in enumerate(health.replicas):
            for one, value in self._of_replicas:
                one.labels(self.model, str(number)).set(value(replica))
            done = replica.state.since(self._told_of.get(number, Statistics()))
            for name, seconds in done.rank_seconds.items():
                self.ranks.labels(self.model, str(number), *name.split()).inc(seconds)
            self._told_of[number] = replica.state
        if state is not None:
            self.running.set(state.running)
            self.waiting.set(state.waiting)
            self.cache.set(state.kv_cache_usage)
            self.preemptions.set(state.preemptions)
            self.steps.set(state.steps)
            for stage, seconds in state.stage_seconds.items():
                self.stages.labels(self.model, stage).set(seconds)
            self.off_steps.set(state.speculation_off_steps)
            self.on.set(state.speculation_on)
            for speculator, count in state.guessed_tokens.items():
                for name in _names_of(speculator):
                    self.guessed_by.labels(self.model, name).set(count)
            for model, factor in state.cost_factors.items():
                self.factors.labels(self.model, model).set(factor)
            if state.prefix_queries:
                self.hit_rate.set(state.prefix_hits / state.prefix_queries)
            self._passed(state.since(self._told))
            self._told = state
        return generate_latest(self.registry)

    def _passed(self, done: Statistics) -> None:
        """Count what passes have read and exchanged since the engine was asked last."""
        self.streamed_bytes.inc(done.streamed_bytes)
        self.stream_waits.inc(done.stream_wait_seconds)

    def speculation(self, figures: SpeculationFigures) -> None:
        """Count what speculation did for an answer."""
        self.drafts.inc(figures.steps if figures.drafted_tokens else 0)
        self.draft_tokens.inc(figures.drafted_tokens)
        self.accepted_tokens.inc(figures.accepted_tokens)
        for position, count in enumerate(figures.accepted_per_depth):
            self.accepted_at.labels(self.model, str(position)).inc(count)
        for counter, counts in (
            (self.verified_by, figures.proposed_by),
            (self.accepted_by, figures.accepted_by),
        ):
            for speculator, count in counts.items():
                for name in _names_of(speculator):
                    counter.labels(self.model, name).inc(count)


def _names_of(speculator: str) -> list[str]:
    """A speculator's name, and its old ones: dashboards may know it by these."""
    return [speculator, *(old for old, new in OLD_NAMES.items() if new == speculator)]


class Observed(CompletionObserver):
    """One completion, as metrics see it."""

    def __init__(self, work: Work, begun: float, metrics: Metrics) -> None:
        super().__init__(work, begun)
        self._metrics = metrics
        self._waits = True  # for its first step
        self._last = begun

    def delta(self, delta: Delta, now: float) -> None:
        """As CompletionObserver says."""
        metrics, count = self._metrics, len(delta.token_ids)
        if self._waits and (delta.begun or count):
            self._waits = False
            metrics.queue_time.observe(now - self.begun)
        if count:
            metrics.generation_tokens.inc(count)
            if self.first is None:
                metrics.first_token.observe(now - self.begun)
            else:
                each = (now - self._last) / count
                for _ in range(count):
                    metrics.between.observe(each)
            self._last = now
        super().delta(delta, now)
        if delta.figures is not None:
            metrics.speculation(delta.figures)

    def end(self, now: float) -> None:
        """Count the completion as ended, in whichever way."""
        metrics = self._metrics
        metrics.success.labels(metrics.model, self.finish_reason).inc()
        metrics.whole.observe(now - self.begun)
        metrics.answer_length.observe(self.tokens)
        if self.first is not None and self.tokens > 1:
            metrics.per_token.observe((self._last - self.first) / (self.tokens - 1))
