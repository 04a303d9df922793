"""OpenTelemetry spans: one for each completion, with the attributes of the generative AI conventions.

Spans never contain the text of a prompt or an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specinfer.errors import ConfigError
from specinfer.request import Delta, FinishReason
from specinfer.serve.backend.work import CompletionObserver, Work
from specinfer.serve.http.api_error import CALLER
from specinfer.version import VERSION

_DEFAULT_PATH: Final = "/v1/traces"
# Parameters that the conventions name gen_ai.request.NAME.
_PARAMETERS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
)
# Figures of speculation, named specinfer.speculation.NAME.
_FIGURES: Final = ("steps", "drafted_tokens", "accepted_tokens", "tokens_per_step")


def open_spans(endpoint: str, model: str) -> Spans:
    """Open spans that are exported to a collector over OTLP/HTTP.

    `endpoint` is the collector's URL; a URL without a path gets /v1/traces. Raises ConfigError if the
    URL is not HTTP or HTTPS, and ImportError if the exporter is not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(f"otlp_endpoint is {endpoint!r}; allowed: a URL like http://localhost:4318")
    if url.path in ("", "/"):
        url = url._replace(path=_DEFAULT_PATH)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    own = Resource({"service.name": "specinfer", "service.version": VERSION})
    resource = own.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
    provider = TracerProvider(resource=Resource.create(resource.attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url.geturl())))
    return Spans(provider, model)


class Spans:
    """Records a span of each completion, with the span in the caller's traceparent header as parent."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("specinfer.serve", VERSION)
        self._callers = TraceContextTextMapPropagator()
        self._model = model

    def observe(self, work: Work, now: float) -> CompletionSpan:
        """Return the observer of a completion that begins now, with an open span."""
        caller, params = CALLER.get(), work.params
        model = work.adapter or self._model
        operation = "text_completion" if caller.path.endswith("/v1/completions") else "chat"
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "specinfer",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": len(work.prompt_token_ids),
            "specinfer.request_id": caller.request_id,
            "specinfer.index": work.index,
        }
        for name in _PARAMETERS:
            value = getattr(params, name)
            if value is not None and (name, value) != ("top_k", 0):
                # An attribute is a signed integer of 64 bits, and a seed may be unsigned.
                attributes[f"gen_ai.request.{name}"] = value if value < 2**63 else str(value)
        headers = {"traceparent": caller.traceparent, "tracestate": caller.tracestate}
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._callers.extract(headers),
            SpanKind.SERVER,
            attributes,
        )
        return CompletionSpan(work, now, span)

    def close(self) -> None:
        """Export the remaining spans; waits for the collector for a limited time."""
        self._provider.shutdown()


@dataclass(eq=False)
class CompletionSpan(CompletionObserver):
    """Observer that fills in one completion's span."""

    _span: Span

    def delta(self, delta: Delta, now: float) -> None:
        """See CompletionObserver."""
        span = self._span
        if delta.token_ids and self.first is None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", now - self.arrived)
        super().delta(delta, now)
        if delta.finish_reason is FinishReason.ERROR:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", "request_error")
        if (figures := delta.figures) is not None:
            for name in _FIGURES:
                span.set_attribute(f"specinfer.speculation.{name}", getattr(figures, name))
            for name, count in figures.accepted_by.items():
                span.set_attribute(f"specinfer.speculation.accepted_by.{name}", count)

    def end(self, now: float) -> None:
        """See CompletionObserver."""
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": self.tokens,
                "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
                "gen_ai.response.finish_reasons": [self.finish_reason.value],
            }
        )
        self._span.end()
