"""Figures of a load from a literal table of times."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.bench.exchange import Exchange
from specinfer.bench.load_figures import figures, lines, table

# Four requests, in seconds of one clock; two answered with usage, one without, one failed.
ANSWERED = [
    Exchange(0.0, arrivals=[1.0, 1.5, 3.0], ended=3.0, prompt_tokens=10, completion_tokens=5),
    Exchange(0.5, arrivals=[1.0], ended=1.0, prompt_tokens=20, completion_tokens=1),
]
UNCOUNTED = Exchange(3.0, arrivals=[5.0, 5.25, 5.5], ended=6.0)
FAILED = Exchange(0.0, arrivals=[0.25], ended=9.0, prompt_tokens=9, completion_tokens=9, error="cut")


def milliseconds(result: dict[str, Any], name: str) -> tuple[float, ...]:
    return tuple(result[f"{statistic}_{name}_ms"] for statistic in ("mean", "median", "std", "p99"))


def test_every_figure_of_a_table_of_times() -> None:
    result = figures([ANSWERED[0], FAILED, ANSWERED[1]], duration=4.0)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["errors"] == ["", "cut", ""]
    assert result["duration"] == 4.0
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 6)
    assert (result["request_throughput"], result["output_throughput"]) == (0.5, 1.5)
    assert result["total_token_throughput"] == 9.0
    assert result["max_concurrent_requests"] == 2
    assert result["tokens_counted_as_chunks"] == 0
    # First chunks after 1 and 0.5 s; gaps of 0.5 and 1.5 s; whole after 3 and 0.5 s.
    assert milliseconds(result, "ttft") == pytest.approx((750, 750, 250, 995))
    assert milliseconds(result, "itl") == pytest.approx((1000, 1000, 500, 1490))
    assert milliseconds(result, "e2el") == pytest.approx((1750, 1750, 1250, 2975))
    # Four tokens in the two seconds behind the first; the other answer has one token alone.
    assert milliseconds(result, "tpot") == pytest.approx((500, 500, 0, 500))
    assert "speculative_decoding" not in result


def test_without_usage_chunks_are_counted_and_reported() -> None:
    result = figures([*ANSWERED, UNCOUNTED], duration=10.0)
    assert result["total_output_tokens"] == 5 + 1 + 3
    assert (result["total_input_tokens"], result["total_token_throughput"]) == (None, None)
    assert result["tokens_counted_as_chunks"] == 1
    assert result["mean_tpot_ms"] == pytest.approx((500 + 500) / 2)
    assert ("tokens in / out", "not known / 9") in table(result)
    [said] = lines(result)
    assert said.startswith("1 answers came without usage: their chunks are counted")


def test_without_answers_figures_are_zero_and_the_first_error_is_shown() -> None:
    result = figures([FAILED, FAILED], duration=2.0)
    assert (result["completed"], result["failed"], result["output_throughput"]) == (0, 2, 0)
    assert milliseconds(result, "ttft") == (0, 0, 0, 0)
    assert lines(result) == ["failed requests: 2; request 1: cut"]


def report(steps: int, drafted: int, accepted: int, histogram: Any = None) -> dict[str, Any]:
    return {
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 99,  # added up from the counts, not averaged
        "draft_acceptance_rate": 99,
        "acceptance_histogram": histogram,
    }


def test_speculation_is_added_up_over_answers() -> None:
    def answer(speculation: dict[str, Any] | None) -> Exchange:
        return Exchange(0.0, [1.0], 1.0, completion_tokens=1, speculation=speculation)

    reports = [
        report(4, 12, 3, [2, 1, 1]),
        report(2, 8, 7, {"3": 1, "4": 1, "x": 1}),
        {"num_spec_steps": 5},  # no report that could be added
        None,
    ]
    failed = Exchange(0.0, error="cut", speculation=report(100, 100, 100))
    result = figures([*map(answer, reports), failed], duration=1.0)
    assert result["speculative_decoding"] == {
        "requests": 2,
        "mean_acceptance_length": 1 + 10 / 6,
        "draft_acceptance_rate": 0.5,
        "num_spec_steps": 6,
        "num_draft_tokens": 20,
        "num_accepted_draft_tokens": 10,
        "acceptance_histogram": [2, 1, 1, 1, 1],
    }
    assert lines(result)[0] == (
        "speculation: 2.67 tokens per step, 10 of 20 drafted tokens accepted (50%) in 6 steps, "
        "as 2 of 4 answers report"
    )
