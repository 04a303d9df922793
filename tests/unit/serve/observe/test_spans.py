"""One span per completion, below the caller's span."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from specinfer.errors import ConfigError
from specinfer.request import Delta, FinishReason, SpeculationFigures
from specinfer.serve.config import ServeConfig
from specinfer.serve.observe.metrics import Metrics
from specinfer.serve.observe.spans import Spans
from specinfer.serve.startup import observers
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL, Script, says
from tests.unit.serve.asked import Asked

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans_of(
    tokenizer: Tokenizer, answer: Script, path: str, body: Mapping[str, Any], **headers: str
) -> tuple[list[ReadableSpan], str]:
    """The spans of one request, and its id."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider, MODEL)
    http = Asked(tokenizer, answer, observers=[spans.observe]).http
    request_id = http.post(path, json=body, headers=headers).headers["x-request-id"]
    spans.close()
    return list(exporter.get_finished_spans()), request_id


def test_a_span_has_parameters_and_counts_but_no_text(tokenizer: Tokenizer) -> None:
    counts = {"steps": 2, "output_tokens": 5, "drafted_tokens": 6, "accepted_tokens": 3}
    figures = SpeculationFigures(**counts, accepted_by={"lookup": 3})
    script = says("Hel", "lo", figures=figures, cached_tokens=4)
    body = {"input": "my secret", "temperature": 0, "max_output_tokens": 9, "seed": 3, "stream": True}
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=x"}
    [span], request_id = spans_of(tokenizer, script, "/responses", body, **headers)
    assert span.name == f"chat {MODEL}"
    assert span.kind is SpanKind.SERVER
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CALLER)
    assert span.parent.trace_state["vendor"] == "x"
    found = dict(span.attributes or {})
    first = found.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(first, float)
    assert 0 <= first <= (span.end_time - span.start_time) / 1e9 + 0.05
    asked = {"model": MODEL, "temperature": 0.0, "top_p": 1.0, "seed": 3, "max_tokens": 9}
    asked |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    usage = {"input_tokens": len("user: my secret\nassistant: "), "output_tokens": 5}
    of_steps = {"steps": 2, "drafted_tokens": 6, "accepted_tokens": 3, "tokens_per_step": 2.5}
    assert found == {
        **{"gen_ai.operation.name": "chat", "gen_ai.provider.name": "specinfer"},
        **{f"gen_ai.request.{name}": value for name, value in asked.items()},
        **{f"gen_ai.usage.{name}": value for name, value in usage.items()},
        "gen_ai.usage.cache_read.input_tokens": 4,
        **{"gen_ai.response.model": MODEL, "gen_ai.response.finish_reasons": ("stop",)},
        **{"specinfer.request_id": request_id, "specinfer.index": 0},
        **{f"specinfer.speculation.{name}": value for name, value in of_steps.items()},
        "specinfer.speculation.accepted_by.lookup": 3,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_an_answer_that_fails_is_an_error(tokenizer: Tokenizer) -> None:
    wrong = Delta("", finish_reason=FinishReason.ERROR, error="my secret leaves no token")
    [span], _ = spans_of(tokenizer, [wrong], "/completions", {"prompt": "p"})
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None
    found = dict(span.attributes or {})
    assert (found["gen_ai.response.finish_reasons"], found["error.type"]) == (("error",), "request_error")


def test_missing_packages_are_named_to_install(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    wanted = ServeConfig(otlp_endpoint="http://localhost:4318")
    message = r"opentelemetry\..* is not installed; .*pip install 'specinfer\[otel\]'"
    with pytest.raises(ConfigError, match=message), observers(wanted, MODEL, Metrics(MODEL), tokenizer):
        pass


def test_opentelemetry_is_imported_only_if_enabled() -> None:
    program = (
        "import sys, specinfer.serve.server, specinfer.serve.api.service\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])\n"
        "print([name for name in sys.modules if name in ('torch', 'specinfer.serve.observe.spans')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout == "[]\n[]\n"
