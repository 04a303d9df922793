"""benchmarks/shared_trunk.py: members learn beside a trunk that stays as it is, and are counted with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import write_tiny_llama


@pytest.mark.thorough
def test_members_are_counted_beside_trees_of_the_trunk(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=3, max_context=1024, tokenizer=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} * {n}"}) + "\n" for n in range(40)))
    work, out = tmp_path / "work", tmp_path / "page.md"

    def run(name: str, *options: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--model", str(target), *map(str, options)])
        threads = torch.get_num_threads()
        try:
            script(name).main()
        finally:
            torch.set_num_threads(threads)

    minutes = ("--minutes", 0.02, "--collect-minutes", 0.01, "--max-answer", 16)
    asked = ("--prompts", prompts, "--work", work, "--out", tmp_path / "boosting.md")
    run("boosting", *asked, *minutes, "--only", "1 block")
    known = ("--head", work / "1-block", "--corpus", work / "corpus" / "work" / "shards")
    run("shared_trunk", *known, "--work", tmp_path / "on", "--minutes", 0.005, "--out", out)
    rows = [line.strip("| ").split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    header, _, *forms = rows
    assert header[0] == "boosted by"
    assert [form[0] for form in forms] == ["discount", "residual", "none"]
    for _, _, own, chains, trees, beside, *_ in forms:
        alone, pool, tree, both = ([*map(float, cell.split())] for cell in (own, chains, trees, beside))
        assert len(alone) == len(pool) == len(tree) == len(both) == 3
        assert alone[0] == pool[0] == tree[0] >= 1
        assert both[0] == tree[1], "two first guesses of the trunk"
        for values in (pool, tree, both):
            assert values == sorted(values), "more guesses are no worse"
    assert len({form[2].split()[0] for form in forms}) == 1, "the trunk is the same in all rows"
