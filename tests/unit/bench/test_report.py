"""Reports of a comparison as JSON and as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specinfer.bench.report import (
    as_json,
    lines,
    table,
)
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
    assert (result["requests"], result["identical"], result["differences"]) == (6, 6, [])
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("promised", "explained", "words"),
    [
        ("identical", [], "identical texts: 6 of 6"),
        (
            "identical",
            [True],
            "1 of 1 first differences are within rounding of the logits, but here all must be ",
        ),
        ("identical", [True, False], "all must be identical; run `specinfer check`, and please report them"),
        ("rounding", [], "identical texts: 6 of 6"),
        ("rounding", [True], "are within rounding of the logits: identical texts are not promised on cuda:0"),
        ("rounding", [True, False], "of the logits; run `specinfer check`, and please report the others"),
    ],
)
def test_a_difference_is_excused_only_where_identical_texts_are_not_promised(
    pair: Any, dataset: Dataset, promised: str, explained: list[bool], words: str
) -> None:
    result = result_of(pair, dataset, GREEDY)
    result["promised"] = promised
    result["differences"] = [{"index": 3, "explained": each} for each in explained]
    result["options"]["device"] = "cuda:0"
    (text,) = [line for line in lines(result) if line.startswith("identical texts")]
    assert words in text
    excused = promised == "rounding" and all(explained)
    assert ("please report" in text) == (explained != [] and not excused)
