"""Prometheus metrics of the server, under vLLM's names where vLLM has the metric."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specinfer.engine.steps import Statistics
from specinfer.request import Delta
from specinfer.serve.backend.work import CompletionObserver, Health, ReplicaHealth, Work

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)
# Each bound doubles, so the relative error of a quantile is the same on every machine.
_SHORT: Final = tuple(0.001 * 2.0**i for i in range(14))  # 1 ms to 8 s
_LONG: Final = tuple(0.01 * 2.0**i for i in range(16))  # 10 ms to 5 minutes
_TOKENS: Final = tuple(2.0**i for i in range(18))

# Gauges of each replica: name, attribute of its health, help text.
_OF_REPLICA: Final = (
    ("up", "takes_work", "1 if the replica takes work, else 0."),
    ("requests_running", "state.running", "Requests in the replica's batch."),
    ("requests_waiting", "state.waiting", "Requests that wait for the replica's batch or cache."),
    ("kv_cache_usage_perc", "state.kv_cache_usage", "Fraction of the replica's KV blocks in use, 0 to 1."),
    ("prefix_queries", "state.prefix_queries", "Prompt tokens looked up in the replica's prefix cache."),
    ("prefix_hits", "state.prefix_hits", "Prompt tokens found in the replica's prefix cache."),
    ("engine_steps", "state.steps", "Steps of the replica's engines."),
    ("restarts", "restarts", "Restarts of the replica's engine."),
)

# Gauges of all engines together: name, attribute of their health, help text.
_OF_ENGINES: Final = (
    ("num_preemptions", "state.preemptions", "Preemptions: times that a request lost its KV blocks."),
    ("engine_steps", "state.steps", "Steps of the engine, summed over restarts."),
    (
        "speculation_off_steps",
        "state.speculation_off_steps",
        "Engine steps in which no speculator could propose.",
    ),
    ("speculation_on", "state.speculation_on", "1 if speculation is on, 0 if the guard has turned it off."),
    (
        "speculators_paused",
        "state.speculators_paused",
        "Speculators, and policies, that pause after an exception.",
    ),
    ("num_requests_running", "state.running", "Requests in the engine's batch."),
    ("num_requests_waiting", "state.waiting", "Requests that wait for the engine's batch or cache."),
    ("kv_cache_usage_perc", "state.kv_cache_usage", "Fraction of the KV blocks in use, 0 to 1."),
    ("engine_restarts", "restarts", "Restarts of engine processes."),
    ("num_handed_on", "handed_on", "Answers moved from one engine to another."),
)
# Those of the statistics with another label: name, attribute, label, help text.
_BY_LABEL: Final = (
    ("engine_stage_seconds", "stage_seconds", "stage", "Seconds of engine steps by stage."),
    ("speculator_failures", "failures", "speculator", "Exceptions of a speculator, or of the policy."),
    (
        *("schema_keywords_unenforced", "unenforced", "keyword"),
        "Requests whose JSON schema is enforced without a keyword.",
    ),
    ("prompt_store", "prompt_store", "event", "Files and bytes of the prompt store, by event."),
    (
        *("guessed_tokens", "guessed_tokens", "speculator"),
        "Proposed draft tokens, verified or not, by speculator.",
    ),
    (
        *("pass_cost_factor", "cost_factors", "model"),
        "Time of a model's passes divided by the time on its cost curve.",
    ),
)


class Metrics:
    """Metrics of one model; those of a server's models are in one registry, apart by the label model_name."""

    def __init__(self, model: str, beside: Metrics | None = None) -> None:
        """`beside` has the registry of the server's other models."""
        self.registry: CollectorRegistry = CollectorRegistry() if beside is None else beside.registry
        self._made: dict[str, Any] = {} if beside is None else beside._made  # by name
        self.model = model  # value of the label model_name
        self._last: dict[int, Statistics] = {}  # by replica, at the last scrape

        def made(kind: type[_Kind], name: str, purpose: str, *labels: str, **more: Any) -> _Kind:
            if name not in self._made:
                names = ["model_name", *labels]
                self._made[name] = kind(f"specinfer:{name}", purpose, names, registry=self.registry, **more)
            found: _Kind = self._made[name]
            return found

        # A metric without another label has one series; `labels` is called once here, not per update.
        def counter(name: str, purpose: str) -> Counter:
            return made(Counter, name, purpose).labels(model)

        def gauge(name: str, purpose: str) -> Gauge:
            return made(Gauge, name, purpose).labels(model)

        def histogram(name: str, purpose: str, buckets: tuple[float, ...]) -> Histogram:
            return made(Histogram, name, purpose, buckets=buckets).labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that started.")
        self.generation_tokens = counter("generation_tokens", "Output tokens of answers.")
        self.success = made(
            Counter, "request_success", "Requests that ended, by finish reason.", "finished_reason"
        )
        self.drafts = counter("spec_decode_num_drafts", "Draft trees that were verified.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        per_depth = "spec_decode_num_accepted_tokens_per_pos"
        self.accepted_at = made(
            Counter, per_depth, "Accepted draft tokens by depth in the tree, from 0.", "position"
        )
        self.accepted_by = made(
            Counter, "accepted_tokens", "Accepted draft tokens by speculator.", "speculator"
        )
        self.verified_by = made(
            Counter, "verified_tokens", "Verified draft tokens by speculator.", "speculator"
        )
        self.misses = made(
            Counter, "prefix_misses", "Prompts that were not wholly found in the cache, by reason.", "reason"
        )
        self.traffic_log_lost = counter("traffic_log_lost", "Completions missing from the log_traffic file.")
        self._of_engines = [(gauge(name, purpose), attrgetter(of)) for name, of, purpose in _OF_ENGINES]
        self._by_label = [(made(Gauge, name, purpose, label), of) for name, of, label, purpose in _BY_LABEL]
        self.streamed_bytes = counter("streamed_bytes", "Bytes of weights read from the disk for passes.")
        self.stream_waits = counter("stream_wait_seconds", "Seconds that passes waited for these bytes.")
        ranks = "Seconds of ranks that computed, exchanged or waited for others."
        self.ranks = made(Counter, "rank_seconds", ranks, "replica", "rank", "doing")
        self._of_replicas = [
            (made(Gauge, f"replica_{name}", purpose, "replica"), attrgetter(of))
            for name, of, purpose in _OF_REPLICA
        ]
        self.hit_rate = gauge("prefix_cache_hit_rate", "Fraction of looked-up prompt tokens found, 0 to 1.")
        self.queue_time = histogram(
            "request_queue_time_seconds", "Seconds from arrival to the first step.", _LONG
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", _LONG
        )
        self.between = histogram(
            "inter_token_latency_seconds", "Seconds between two deltas, divided by their tokens.", _SHORT
        )
        self.per_token = histogram(
            "time_per_output_token_seconds", "Seconds per output token of an answer, after the first.", _SHORT
        )
        self.whole = histogram("e2e_request_latency_seconds", "Seconds from arrival to the end.", _LONG)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of each request.", _TOKENS)
        self.answer_length = histogram("request_generation_tokens", "Output tokens of each answer.", _TOKENS)

    def observe(self, work: Work, now: float) -> Observed:
        """Count a new completion; returns its observer."""
        prompt_tokens = len(work.prompt_token_ids)
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_length.observe(prompt_tokens)
        return Observed(work, now, self)

    def text(self, health: Health | None = None) -> bytes:
        """The metrics of all models in Prometheus' text format, updated from this one's `health`."""
        if health is not None:
            self.update(health)
        return generate_latest(self.registry)

    def reset(self) -> None:
        """Set the gauges of engines that have been ended to 0."""
        self._last.clear()
        self.update(
            Health(Statistics(), trouble="ended", replicas=(ReplicaHealth(Statistics(), trouble="ended"),))
        )

    def update(self, health: Health) -> None:
        """Update the metrics from the health of the model's engines."""
        state = health.state
        for number, replica in enumerate(health.replicas):
            for one, value in self._of_replicas:
                one.labels(self.model, str(number)).set(value(replica))
            done = replica.state.since(self._last.get(number, Statistics()))
            self.streamed_bytes.inc(done.streamed_bytes)
            self.stream_waits.inc(done.stream_wait_seconds)
            for name, seconds in done.rank_seconds.items():
                self.ranks.labels(self.model, str(number), *name.split()).inc(seconds)
            self._last[number] = replica.state
        for gauge, of in self._of_engines:
            gauge.set(of(health))
        for gauge, attribute in self._by_label:
            for label, number in getattr(state, attribute).items():
                gauge.labels(self.model, label).set(number)
        if state.prefix_queries:
            self.hit_rate.set(state.prefix_hits / state.prefix_queries)


@dataclass(eq=False)
class Observed(CompletionObserver):
    """Observer that counts one completion."""

    _metrics: Metrics
    _waits: bool = field(default=True, init=False)  # until its first step
    _last: float = field(default=0.0, init=False)  # time of the last delta with tokens

    def delta(self, delta: Delta, now: float) -> None:
        """See CompletionObserver."""
        metrics, count = self._metrics, len(delta.token_ids)
        if self._waits and (delta.started or count):
            self._waits = False
            metrics.queue_time.observe(now - self.arrived)
        if count:
            metrics.generation_tokens.inc(count)
            if self.first is None:
                metrics.first_token.observe(now - self.arrived)
            else:
                each = (now - self._last) / count
                for _ in range(count):
                    metrics.between.observe(each)
            self._last = now
        super().delta(delta, now)
        if delta.miss is not None:
            metrics.misses.labels(metrics.model, delta.miss.reason).inc()
        if (figures := delta.figures) is not None:
            metrics.drafts.inc(figures.steps if figures.drafted_tokens else 0)
            metrics.draft_tokens.inc(figures.drafted_tokens)
            metrics.accepted_tokens.inc(figures.accepted_tokens)
            for position, accepted in enumerate(figures.accepted_per_depth):
                metrics.accepted_at.labels(metrics.model, str(position)).inc(accepted)
            for speculator, accepted in figures.accepted_by.items():
                metrics.accepted_by.labels(metrics.model, speculator).inc(accepted)
            for speculator, proposed in figures.proposed_by.items():
                metrics.verified_by.labels(metrics.model, speculator).inc(proposed)

    def end(self, now: float) -> None:
        """Count the end of the completion, whatever its finish reason."""
        metrics = self._metrics
        metrics.success.labels(metrics.model, self.finish_reason).inc()
        metrics.whole.observe(now - self.arrived)
        metrics.answer_length.observe(self.tokens)
        if self.first is not None and self.tokens > 1:
            metrics.per_token.observe((self._last - self.first) / (self.tokens - 1))
