"""benchmarks/policy_shape.py: learned shapes beside fixed ones, on the curves of several machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specinfer.replay.recorder import record
from specinfer.replay.trace_store import write_trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SamplingParams
from tests.engines import write_tiny

CHEAP, DEAR = "cheap: 1:10,64:11 | 1:1,64:1.1", "dear: 1:10,2:20,64:640 | 1:1,64:9"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three texts that a draft often guesses."""
    folder = tmp_path_factory.mktemp("shape")
    llm = write_tiny(folder, vocab_size=64, max_context=96, spread=0.25).llm(drafts=("similar",))
    params = [SamplingParams(temperature=0, max_tokens=12, seed=0) for _ in range(3)]
    asked = llm.intake.prompts([[i, i + 1, i] * 3 for i in range(3)], params)
    write_trace(folder / "texts-00.npz", record(llm, [one.request for [one] in asked]))
    llm.close()
    return folder / "texts-00.npz"


def test_shapes_are_compared_by_the_curves_of_machines(
    script: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("policy_shape")
    out = tmp_path / "page.md"
    options = ["--traces", trace, "--curves", CHEAP, "--curves", DEAR, "--out", out]
    monkeypatch.setattr(sys, "argv", ["policy_shape.py", *map(str, options)])
    module.main()
    rows = [line.strip("| ").split(" | ") for line in out.read_text().splitlines() if " learned |" in line]
    cheap, dear = ({"nodes": float(nodes), "over": over} for *_, nodes, _, _, over in rows)
    assert cheap["nodes"] > dear["nodes"], "where rows cost nothing more are verified"
    assert "[" in cheap["over"]


def test_a_trace_has_the_curves_it_is_given(script: Any) -> None:
    module = script("policy_shape")
    name, target, draft = module.curves_of(CHEAP)
    assert (name, target, draft) == (
        "cheap",
        CostCurve((1, 64), (0.01, 0.011)),
        CostCurve((1, 64), (1e-3, 1.1e-3)),
    )


@pytest.mark.parametrize("text", ["", "cheap", "cheap: 1:10", "cheap: 1:x | 1:1", "cheap: 1:10 | 1"])
def test_curves_that_cannot_be_read_are_refused(script: Any, text: str) -> None:
    with pytest.raises(Exception, match="allowed: a name"):
        script("policy_shape").curves_of(text)
