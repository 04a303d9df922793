"""Figures of a load test, named and defined as in `vllm bench serve`, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specinfer.bench.exchange import Exchange

TIMES = {  # reported as mean, median, standard deviation and 99th percentile
    "ttft": "time to first token",
    "tpot": "time per output token, but for the first",
    "itl": "between chunks",
    "e2el": "request to end",
}
_COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def figures(exchanges: Sequence[Exchange], duration: float) -> dict[str, Any]:
    """Return throughput and latencies of requests that took `duration` seconds in total, as plain JSON
    values.

    Failed requests only add to the number of failures. Times are in milliseconds, or 0 without answers.
    `total_input_tokens` is None if the server did not report the prompt tokens of an answer.
    `speculative_decoding` is present if an answer reported it.
    """
    answered = [exchange for exchange in exchanges if not exchange.error]
    prompts = [exchange.prompt_tokens for exchange in answered]
    total_output = sum(exchange.output_tokens for exchange in answered)
    total_input = None if None in prompts else sum(count for count in prompts if count is not None)
    times = {
        "ttft": [exchange.ttft for exchange in answered],
        "tpot": [exchange.tpot for exchange in answered if exchange.tpot is not None],
        "itl": [gap for exchange in answered for gap in exchange.itls],
        "e2el": [exchange.e2el for exchange in answered],
    }
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(answered),
        "failed": len(exchanges) - len(answered),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(answered) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": None if total_input is None else (total_input + total_output) / duration,
        "max_concurrent_requests": _max_concurrency(answered),
        "tokens_counted_as_chunks": sum(exchange.completion_tokens is None for exchange in answered),
    }
    for name in TIMES:
        result.update(_statistics(name, times[name]))
    if (speculation := _speculation(answered)) is not None:
        result["speculative_decoding"] = speculation
    result["errors"] = [exchange.error for exchange in exchanges]
    return result


def table(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows of name and value; `result` comes from `figures`."""

    def known(key: str, form: str) -> str:
        return "not known" if result[key] is None else format(result[key], form)

    return [
        ("requests completed / failed", f"{result['completed']} / {result['failed']}"),
        ("most at once", str(result["max_concurrent_requests"])),
        ("duration, s", f"{result['duration']:.2f}"),
        ("tokens in / out", f"{known('total_input_tokens', 'd')} / {result['total_output_tokens']}"),
        ("requests/s", f"{result['request_throughput']:.2f}"),
        ("output tokens/s", f"{result['output_throughput']:.1f}"),
        ("tokens/s, prompts included", known("total_token_throughput", ".1f")),
    ]


def times_table(result: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return rows of name, mean, median, standard deviation and 99th percentile, in ms."""
    statistics = ("mean", "median", "std", "p99")
    return [
        (f"{label} ({name})", *(f"{result[f'{statistic}_{name}_ms']:.1f}" for statistic in statistics))
        for name, label in TIMES.items()
    ]


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return facts that the tables do not show, as lines of text."""
    facts = []
    if report := result.get("speculative_decoding"):
        facts.append(
            f"speculation: {report['mean_acceptance_length']:.2f} tokens per step, "
            f"{report['num_accepted_draft_tokens']} of {report['num_draft_tokens']} drafted tokens accepted "
            f"({100 * report['draft_acceptance_rate']:.0f}%) in {report['num_spec_steps']} steps, as "
            f"{report['requests']} of {result['completed']} answers report"
        )
    if chunks := result["tokens_counted_as_chunks"]:
        facts.append(
            f"{chunks} answers came without usage: their chunks are counted as their tokens, and a chunk may "
            "hold several"
        )
    failed = [(number, error) for number, error in enumerate(result["errors"], start=1) if error]
    if failed:
        number, error = failed[0]
        facts.append(f"failed requests: {len(failed)}; request {number}: {error}")
    return facts


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.asarray(seconds or [0.0])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def _max_concurrency(answered: Sequence[Exchange]) -> int:
    # Sorted, an end precedes a start at the same time: these two requests did not overlap.
    changes = sorted(change for exchange in answered for change in ((exchange.sent, 1), (exchange.ended, -1)))
    at_once = maximum = 0
    for _, change in changes:
        at_once += change
        maximum = max(maximum, at_once)
    return maximum


def _speculation(answered: Sequence[Exchange]) -> dict[str, Any] | None:
    """Sum the speculation figures of answers; rates are of the sums, so long answers weigh more."""
    reports = [exchange.speculation for exchange in answered if exchange.speculation is not None]
    reports = [report for report in reports if all(isinstance(report.get(key), int) for key in _COUNTS)]
    if not reports:
        return None
    steps, drafted, accepted = (sum(report[key] for report in reports) for key in _COUNTS)
    result: dict[str, Any] = {
        "requests": len(reports),
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        **dict(zip(_COUNTS, (steps, drafted, accepted), strict=True)),
    }
    if histogram := _histogram(reports):
        result["acceptance_histogram"] = histogram
    return result


def _histogram(reports: Sequence[Mapping[str, Any]]) -> list[int]:
    """Count steps by number of accepted tokens, 0, 1, ...; reports may omit counts of zero."""
    total: dict[int, int] = {}
    for report in reports:
        counts = report.get("acceptance_histogram")
        if isinstance(counts, list):
            counts = dict(enumerate(counts))
        for accepted, steps in counts.items() if isinstance(counts, Mapping) else ():
            if str(accepted).isdecimal() and isinstance(steps, int):
                total[int(accepted)] = total.get(int(accepted), 0) + steps
    return [total.get(accepted, 0) for accepted in range(max(total, default=-1) + 1)]
