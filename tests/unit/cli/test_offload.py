"""Commands on a model that exceeds its memory limit."""

import json
import re
from pathlib import Path

import pytest

from tests.offloading import FLAGS, count_models_alone, write_large
from tests.unit.cli.conftest import Run

pytestmark = pytest.mark.thorough

FIGURES = r"\d+ passes, \d+\.\d\d tokens per pass \| [\d.]+ MB streamed \| \d+\.\d s waited for the disk"


@pytest.fixture
def large(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options: a model, half of whose layers are streamed."""
    count_models_alone(monkeypatch)
    return ["--model", str(write_large(tmp_path / "large")), *FLAGS]


def test_generate_reports_the_plan_and_streamed_weights(large: list[str], run: Run) -> None:
    status, _, err = run("generate", *large, "--max-tokens", 12, "ab")
    assert status == 0, err
    [decided] = [line for line in err.splitlines() if "layers streamed" in line]
    assert decided.startswith("large: 6 of 8 layers streamed, 2.9 MB a pass at 10 MB/s from ")
    assert "draft: the target itself in fewer bits" in decided
    assert re.fullmatch(rf"\[{FIGURES}.*\]", err.splitlines()[-1])


def test_bench_counts_streamed_weights_by_side(large: list[str], run: Run) -> None:
    limits = ("--limit", 3, "--max-tokens", 12)
    status, out, err = run("bench", *large, *limits, "--json", "-")
    assert status == 0, err
    result = json.loads(out)
    assert result["identical"] == 3
    assert "6 of 8 layers streamed" in result["options"]["memory_plan"]
    assert result["options"]["memory"] == 7_100_000
    layer = 475136
    plain, guessed = result["baseline"], result["speculative"]
    for side in (plain, guessed):
        assert side["tokens_per_pass"] == side["total_output"] / side["passes"]
        # Up to two layers a turn were read, or are left, in the other side's turns.
        assert abs(side["streamed_bytes"] - 6 * layer * side["passes"]) <= 3 * 2 * layer
        assert side["stream_wait_seconds"] > 0
    assert guessed["passes"] < plain["passes"]


def test_a_model_that_does_not_fit_is_refused_with_the_streamed_size(large: list[str], run: Run) -> None:
    few = ("--memory", 3_000_000, "--kv-cache-memory", "256KB", "--quantization", "none")
    status, _, err = run("generate", *large, *few, "--offload", "never", "ab")
    assert status == 2
    [line] = err.splitlines()
    assert re.match(r"specinfer: error: --memory \(memory\) is 2\.86 MiB, and \d+MB are needed: ", line)
    assert re.search(
        r"; or --offload auto: 7 of 8 layers streamed, 3\.3 MB a pass at 10 MB/s from \S+, "
        r"about 0\.33 s a pass$",
        line,
    )
