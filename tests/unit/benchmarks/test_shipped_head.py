"""benchmarks/shipped_head: prompts that are of our own, and the same every time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[3] / "benchmarks" / "shipped_head" / "prompts.py"


def test_there_are_many_different_prompts_of_every_kind_the_same_every_time() -> None:
    spec = importlib.util.spec_from_file_location("shipped_head_prompts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = list(module.prompts())
    assert rows == list(module.prompts())
    texts = {row["prompt"] for row in rows}
    assert len(texts) == len(rows) >= 550
    assert not any("{" in text or "  " in text for text in texts)
    kinds = [row["category"] for row in rows]
    assert len(set(kinds)) == 9
    assert min(kinds.count(kind) for kind in set(kinds)) >= 40
