"""benchmarks/machines/upcycled.py with a tiny model: the mixture writes the dense model's texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.kernels import library_or_skip
from tests.unit.benchmarks.conftest import Run


def test_a_mixture_of_equal_experts_writes_the_dense_models_texts(
    script: Callable[[str], ModuleType], run: Run, pair: tuple[str, str], dataset: str, tmp_path: Path
) -> None:
    library_or_skip()
    module = script("upcycled")
    options = ["--model", pair[0], "--draft", pair[1], "--dataset", dataset, "--max-tokens", "12"]
    page = run(module, *options, "--limit", "2", "--threads", "1")
    [cell] = json.loads((tmp_path / "page.json").read_text())["cells"].values()
    assert cell["texts"] == cell["as_dense"] == 2
    assert cell["equal"] == {"mixture": 2, "dense": 2}
    for model in ("mixture", "dense"):
        speeds = cell["speeds"][model]
        assert {*speeds} == {*module.WAYS}
        assert all(one["tokens"] == 2 * 11 and min(one["seconds"]) > 0 for one in speeds.values())
        assert speeds["none"]["nodes"] == speeds["control"]["nodes"] == 0
        assert 2 < speeds["chain"]["nodes"] <= 3
        assert speeds["chain"]["tokens_per_step"] > 1, "the draft often agrees"
    experts = cell["experts"]
    assert experts["counted"]["1"] == experts["expected"]["1"] == 2
    assert 2 < experts["counted"]["8"] <= 8, "tokens choose different experts"
    assert 1 / 8 < experts["most_used"] < 1 / 2
    rows = [[field.strip() for field in line.strip("|").split("|")] for line in page if line.startswith("| ")]
    assert [row[:2] for row in rows[1:3]] == [["rows", "mixture"], ["rows", "dense"]]
    assert run(module, *options, "--limit", "2", "--threads", "1") == page, "everything was measured"


def test_a_batch_is_a_round(
    script: Callable[[str], ModuleType], run: Run, pair: tuple[str, str], tmp_path: Path
) -> None:
    library_or_skip()
    module, path = script("upcycled"), tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(5)))
    options = ["--model", pair[0], "--draft", pair[1], "--dataset", str(path), "--max-tokens", "6"]
    run(module, *options, "--limit", "1", "--batch-size", "2", "--threads", "1", "--experts", "4")
    [cell] = json.loads((tmp_path / "page.json").read_text())["cells"].values()
    assert cell["texts"] == cell["as_dense"] == 2, "of the second round; the first one warms up"
    assert len(cell["speeds"]["mixture"]["draft"]["seconds"]) == 1
    assert cell["experts"]["expected"]["2"] == 4 * (1 - 0.5**2)
