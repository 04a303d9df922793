"""The picture of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer.bench import plot
from specinfer.bench.report import as_json
from specinfer.bench.run import Load, compare
from specinfer.report.dataset import Dataset
from specinfer.sampling_params import SamplingParams


@pytest.mark.thorough
@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_is_drawn(pair: Any, dataset: Dataset, tmp_path: Path, suffix: str, start: bytes) -> None:
    plain, speculative = pair()
    load = Load(params=SamplingParams(temperature=0, max_tokens=8), chat=False)
    result = as_json(compare(plain, speculative, dataset, load), speculative, dataset, load)
    path = tmp_path / f"picture{suffix}"
    plot.draw(result, path)
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


def test_a_run_in_which_nobody_could_guess_has_a_picture_too(
    pair: Any, dataset: Dataset, tmp_path: Path
) -> None:
    plain, speculative = pair()
    load = Load(params=SamplingParams(temperature=0, max_tokens=1), chat=False)
    result = as_json(compare(plain, speculative, dataset, load), speculative, dataset, load)
    assert result["speculative"]["acceptance_per_depth"] == []
    plot.draw(result, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
