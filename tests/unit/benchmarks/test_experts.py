"""benchmarks/machines/experts.py from its shape to its page, with a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest

from specinfer.kernels.bandwidth import Bandwidth
from specinfer.models.config import Experts
from tests.kernels import library_or_skip
from tests.unit.benchmarks.conftest import Run


def test_a_page_has_what_passes_read_of_their_experts(
    script: Callable[[str], ModuleType], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_or_skip()
    module = script("experts")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "embedding_size": 64,
        "intermediate_size": 32,
        "max_context": 256,
    }
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    tiny = replace(module.shape(2), experts=Experts(16, 2, 32, normalized=True), **sizes, **heads)
    monkeypatch.setattr(module, "shape", lambda layers: tiny)
    monkeypatch.setattr(module, "PASSES", 2)
    monkeypatch.setattr(module, "Bandwidth", partial(Bandwidth, size=1 << 20))
    page = run(module, "--layers", "2", "--threads", "1")
    kinds = [line for line in page if line.startswith("## ")]
    assert kinds == ["## int8", "## int4"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("| ")]
    found = [row for row in rows if row[0].isdecimal()]
    assert [int(row[0]) for row in found] == 2 * [*module.NODES]
    experts = [float(row[-1]) for row in found[: len(module.NODES)]]
    assert experts[0] == 2
    assert experts == sorted(experts)
    assert experts[-1] > 4, "tokens choose different experts"
    assert all(float(row[3]) > 0 for row in found)
    assert run(module, "--layers", "2", "--threads", "1") == page, "everything was measured"
