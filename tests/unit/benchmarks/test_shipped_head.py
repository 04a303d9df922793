"""benchmarks/shipped_head: prompts that are of our own, and the same every time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "shipped_head" / "prompts.py"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shipped_head_prompts", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_there_are_many_different_prompts_of_every_kind_the_same_every_time(module: ModuleType) -> None:
    rows = list(module.prompts())
    assert rows == list(module.prompts())
    texts = {row["prompt"] for row in rows}
    assert len(texts) == len(rows) >= 1500
    assert not any("{" in text or "  " in text for text in texts)
    kinds = [row["category"] for row in rows]
    assert len(set(kinds)) == 9
    assert min(kinds.count(kind) for kind in set(kinds)) >= 60


def test_of_other_files_short_prompts_are_taken(module: ModuleType, tmp_path: Path) -> None:
    texts = ["short", "x" * (module.LONGEST - 1), "x" * module.LONGEST]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": text}) + "\n" for text in texts))
    assert list(module.short([str(file)])) == [{"prompt": text} for text in texts[:2]]
