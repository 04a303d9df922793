"""`specinfer bench` from options to figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specinfer.cli.bench import bench
from specinfer.errors import ConfigError, DatasetError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(bench, [*arguments, "--max-tokens", "6"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_and_file(pair: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    printed = run(*pair, "--limit", "3", "--json", str(out))
    result = json.loads(out.read_text())
    assert f"speedup: {result['speedup']:.2f}x" in printed
    assert "without speculation" in printed
    assert "identical texts: 3 of 3" in printed
    assert (result["requests"], result["dataset"]["name"]) == (3, "built-in")
    assert result["options"]["chat"] is False
    assert result["command"]


def test_a_data_set_sampled_in_a_batch_and_printed_as_json(pair: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"prompt": "a"}\n')
    printed = run(
        *pair, "--dataset", str(rows), "--temperature", "1", "--seed", "3", "--batch-size", "2", "--json", "-"
    )
    result = json.loads(printed)
    assert (result["requests"], result["identical"]) == (3, 3)
    assert result["dataset"]["duplicates_dropped"] == 1
    assert result["options"]["scheduler"]["max_batch_size"] == 2
    assert result["options"]["sampling"]["seed"] == 3


def test_invalid_comparisons_are_refused(pair: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculation is off"):
        run(*pair[:2], "--no-lookup", "--kv-cache-memory", "64MB")
    assert "'--batch-size': 0" in CliRunner().invoke(bench, [*pair, "--batch-size", "0"]).output
    with pytest.raises(DatasetError, match="cannot read the data set"):
        run(*pair, "--dataset", str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="there is no folder"):
        run(*pair, "--json", str(tmp_path / "none" / "out.json"))
