"""The figures of a load on a server, named and defined as `vllm bench serve` does, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specinfer.bench.exchange import Exchange

TIMES = {  # of each the mean, median, standard deviation and 99th percentile are given
    "ttft": "time to first token",
    "tpot": "time per output token, but for the first",
    "itl": "between chunks",
    "e2el": "request to end",
}
_COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def figures(exchanges: Sequence[Exchange], duration: float) -> dict[str, Any]:
    """Throughput and latencies of requests that took `duration` seconds together, as plain JSON values.

    Failed requests count as failed and nowhere else. Times are in milliseconds, those of no answer 0.
    `total_input_tokens` is None where the server did not count the tokens of some answered prompt;
    `speculative_decoding` is there when some answer came with it.
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
        "max_concurrent_requests": _most_at_once(answered),
        "tokens_counted_as_chunks": sum(exchange.completion_tokens is None for exchange in answered),
    }
    for name in TIMES:
        result.update(_statistics(name, times[name]))
    if (speculation := _speculation(answered)) is not None:
        result["speculative_decoding"] = speculation
    result["errors"] = [exchange.error for exchange in exchanges]
    return result


def table(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of name and value; `result` is what `figures` returns."""

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
    """Rows of name, mean, median, standard deviation and 99th percentile, in ms."""
    statistics = ("mean", "median", "std", "p99")
    return [
        (f"{label} ({name})", *(f"{result[f'{statistic}_{name}_ms']:.1f}" for statistic in statistics))
        for name, label in TIMES.items()
    ]


def lines(result: Mapping[str, Any]) -> list[str]:
    """What the tables do not say, in words."""
    said = []
    if report := result.get("speculative_decoding"):
        said.append(
            f"speculation: {report['mean_acceptance_length']:.2f} tokens per step, "
            f"{report['num_accepted_draft_tokens']} of {report['num_draft_tokens']} drafted tokens accepted "
            f"({100 * report['draft_acceptance_rate']:.0f}%) in {report['num_spec_steps']} steps, as "
            f"{report['requests']} of {result['completed']} answers report"
        )
    if chunks := result["tokens_counted_as_chunks"]:
        said.append(
            f"{chunks} answers came without usage: their chunks are counted as their tokens, and a chunk may "
            "hold several"
        )
    failed = [(number, error) for number, error in enumerate(result["errors"], start=1) if error]
    if failed:
        number, error = failed[0]
        said.append(f"failed requests: {len(failed)}; request {number}: {error}")
    return said


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.asarray(seconds or [0.0])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def _most_at_once(answered: Sequence[Exchange]) -> int:
    # Sorted, an end stands before a beginning of the same time: the two were not at work together.
    changes = sorted(change for exchange in answered for change in ((exchange.sent, 1), (exchange.ended, -1)))
    at_once = most = 0
    for _, change in changes:
        at_once += change
        most = max(most, at_once)
    return most


def _speculation(answered: Sequence[Exchange]) -> dict[str, Any] | None:
    """What the answers report, added up; rates are of the sums, so that long answers weigh more."""
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
    """Steps by how many drafted tokens they accepted: 0, 1, ...; reports may leave counts of zero out."""
    total: dict[int, int] = {}
    for report in reports:
        counts = report.get("acceptance_histogram")
        if isinstance(counts, list):
            counts = dict(enumerate(counts))
        for accepted, steps in counts.items() if isinstance(counts, Mapping) else ():
            if str(accepted).isdecimal() and isinstance(steps, int):
                total[int(accepted)] = total.get(int(accepted), 0) + steps
    return [total.get(accepted, 0) for accepted in range(max(total, default=-1) + 1)]
