"""Reports of a comparison as JSON and as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specinfer.bench.report import as_json, lines, table
from specinfer.bench.run import Load, compare
from specinfer.report.dataset import Dataset
from specinfer.sampling_params import SamplingParams

GREEDY = Load(params=SamplingParams(temperature=0, max_tokens=12), chat=False)


def result_of(pair: Any, dataset: Dataset, load: Load, **options: Any) -> dict[str, Any]:
    plain, speculative = pair(**options)
    result = as_json(compare(plain, speculative, dataset, load), speculative, dataset, load)
    plain_values: dict[str, Any] = json.loads(json.dumps(result))
    return plain_values


def test_the_json_has_figures_and_settings(pair: Any, dataset: Dataset) -> None:
    result = result_of(pair, dataset, GREEDY)
    baseline, speculative = result["baseline"], result["speculative"]
    assert (result["requests"], result["identical"]) == (6, 6)
    assert result["speedup"] == speculative["output_throughput"] / baseline["output_throughput"]
    assert result["tokens_per_step"] == speculative["tokens_per_step"] > baseline["tokens_per_step"] == 1
    for run in (baseline, speculative):
        assert (run["completed"], run["failed"], run["total_output"]) == (6, 0, 72)
        assert run["output_throughput"] == pytest.approx(72 / run["duration"])
        assert run["request_throughput"] == pytest.approx(6 / run["duration"])
        assert 0 < run["ttft_ms"]["median"] <= run["ttft_ms"]["p99"]
        assert 0 < run["tpot_ms"]["mean"] < run["e2el_ms"]["mean"]
        assert sum(stage["share"] for stage in run["stages"].values()) == pytest.approx(1)
        assert run["preemptions"] == 0
    assert set(speculative["credit"]) == {"0-similar", "lookup"}
    assert speculative["credit"]["0-similar"]["accepted"] > 0
    assert 0 < speculative["acceptance_per_depth"][0] <= 1
    assert baseline["credit"] == {}
    assert baseline["acceptance_per_depth"] == []
    assert result["versions"]["specinfer"]
    assert result["hardware"]["memory_bytes"] > 1 << 28
    assert result["options"]["speculation"]["expansion"] == "1,1,3,1,1"


def test_the_table_never_shows_a_speed_without_the_one_it_compares_with(pair: Any, dataset: Dataset) -> None:
    result = result_of(pair, dataset, GREEDY)
    rows = {name: (without, with_) for name, without, with_ in table(result)}
    assert rows["output tokens/s"] == tuple(
        f"{result[run]['output_throughput']:.1f}" for run in ("baseline", "speculative")
    )
    assert rows["tokens per step"][0] == "1.00"
    text = "\n".join(lines(result))
    assert "identical texts: 6 of 6" in text
    assert f"{result['speculative']['credit']['0-similar']['accepted']} of" in text


def test_a_difference_is_excused_only_where_identical_texts_are_not_promised(
    pair: Any, dataset: Dataset
) -> None:
    result = result_of(pair, dataset, GREEDY)
    result["options"]["device"] = "cuda:0"
    for promised, identical, words in (
        ("identical", 6, "identical texts: 6 of 6"),
        ("identical", 5, "5 of 6, but here all must be identical; run `specinfer check`, and please report"),
        ("rounding", 6, "identical texts: 6 of 6"),
        ("rounding", 5, "5 of 6; they are not promised on cuda:0: `specinfer check` tells rounding from"),
        ("law", 2, "2 of 6 (sampling with mss keeps the law of the text"),
    ):
        (text,) = [
            line
            for line in lines({**result, "promised": promised, "identical": identical})
            if line.startswith("identical texts")
        ]
        assert words in text, (promised, identical)
        assert ("please report" in text) == (promised == "identical" and identical < 6)
