"""Speculation metrics in Prometheus' format."""

from prometheus_client.parser import text_string_to_metric_families

from specinfer.engine.steps import Statistics
from specinfer.request import Delta, FinishReason, SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.work import Health, Work
from specinfer.serve.observe.metrics import Metrics

WORK = Work("a", (1, 2, 3), SamplingParams())


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every metric by its name and its labels but the model's."""
    text = metrics.text(Health(Statistics())).decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[sample.name.removeprefix("specinfer:"), *labels.values()] = sample.value
    return found


def test_verified_and_accepted_tokens_are_counted_by_speculator() -> None:
    metrics = Metrics("tiny")
    for proposed, accepted in (({"lookup": 6, "draft": 9}, {"draft": 4}), ({"lookup": 2}, {"lookup": 1})):
        figures = SpeculationFigures(proposed_by=proposed, accepted_by=accepted)
        metrics.observe(WORK, 0.0).delta(Delta("a", finish_reason=FinishReason.LENGTH, figures=figures), 1.0)
    found = samples(metrics)
    for kind, counts in (("verified", {"lookup": 8, "draft": 9}), ("accepted", {"lookup": 1, "draft": 4})):
        assert {name[1]: found[name] for name in found if name[0] == f"{kind}_tokens_total"} == counts


def test_how_long_requests_wait_for_their_first_step_is_counted_once() -> None:
    metrics = Metrics("tiny")
    one, other, never = (metrics.observe(WORK, 10.0) for _ in range(3))
    for delta, now in ((Delta("a"), 11.0), (Delta("a", started=True), 14.0), (Delta("a", "x", (1,)), 20.0)):
        one.delta(delta, now)
    other.delta(Delta("b", "x", (1,), started=True), 12.0)  # both in one delta
    never.delta(Delta("c"), 11.0)
    never.end(30.0)
    found = samples(metrics)
    assert found["request_queue_time_seconds_count",] == 2
    assert found["request_queue_time_seconds_sum",] == 4.0 + 2.0
    assert found["time_to_first_token_seconds_sum",] == 10.0 + 2.0
