"""Simple statistics over measured response times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    count: int
    mean: float
    median: float
    p95: float
    deviation: float
    smallest: float
    largest: float


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, interpolated."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}, expected 0 to 1")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = math.ceil(position)
    weight = position - low
    return ordered[low] * (1 - weight) + ordered[high] * weight


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; zero for a single value."""
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / (len(values) - 1))


def summarize(values: Sequence[float]) -> Summary:
    return Summary(
        count=len(values),
        mean=mean(values),
        median=percentile(values, 0.5),
        p95=percentile(values, 0.95),
        deviation=deviation(values),
        smallest=min(values),
        largest=max(values),
    )


def format_summary(name: str, summary: Summary) -> str:
    return (
        f"{name}: n={summary.count} mean={summary.mean:.1f} ms median={summary.median:.1f} ms "
        f"p95={summary.p95:.1f} ms sd={summary.deviation:.1f} "
        f"range={summary.smallest:.1f}-{summary.largest:.1f}"
    )


def histogram(values: Sequence[float], buckets: int = 10, width: int = 40) -> str:
    """Bars drawn with characters, one line per bucket."""
    low, high = min(values), max(values)
    step = (high - low) / buckets or 1.0
    counts = [0] * buckets
    for value in values:
        counts[min(int((value - low) / step), buckets - 1)] += 1
    tallest = max(counts)
    lines = []
    for number, count in enumerate(counts):
        bar = "#" * round(width * count / tallest)
        lines.append(f"{low + number * step:10.1f} | {bar} {count}")
    return "\n".join(lines)
