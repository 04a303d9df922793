"""benchmarks/policy_ablation.py: what is left out is left out, and there again afterwards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from specinfer.replay.recorder import record
from specinfer.replay.replay import simulated_engine
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace, write_trace
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.tree.expansion import Expansion
from tests.engines import write_tiny


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of two kinds of text that a draft often guesses."""
    folder = tmp_path_factory.mktemp("ablation")
    llm = write_tiny(folder, vocab_size=64, max_context=96, spread=0.25).llm(drafts=("similar",), ngram=True)
    params = [SamplingParams(temperature=0, max_tokens=12, seed=0)] * 2
    files = []
    for kind, first in (("chat", 0), ("code", 7)):
        asked = llm.intake.prompts([[i, i + 1, i] * 3 for i in range(first, first + 2)], params)
        files.append(folder / f"{kind}-00.npz")
        write_trace(files[-1], record(llm, [one.request for [one] in asked]))
    llm.close()
    return files


def test_drafts_are_asked_first_where_that_is_what_is_left_out(script: Any, traces: list[Path]) -> None:
    module = script("policy_ablation")
    trace: Trace = read_trace(traces[0])

    def asked() -> list[str]:
        engine, _ = simulated_engine(trace, FixedPolicy())
        return [speculator.name for speculator in engine._ensemble._speculators]

    usual = asked()
    with module.drafts_first():
        assert asked() == [*sorted(usual, key=lambda name: name not in trace.drafts)] != usual
    assert asked() == usual


def test_pieces_of_a_trace_are_not_in_the_other_one(script: Any, traces: list[Path]) -> None:
    pieces, trace = script("policy_ablation").pieces(), read_trace(traces[0])
    assert trace.speculation.ngram
    assert dict(pieces["drafts"].other(trace).drafts) == {} != dict(trace.drafts)
    alone = pieces["lookups"].other(trace)
    assert (alone.speculation.ngram, alone.speculation.suffix) == (False, False)
    assert [text.prediction for text in alone.texts] == [()] * len(trace.texts)
    assert alone.drafts is trace.drafts
    shaped = pieces["learned shapes (1,1,3,1,1)"].other(trace).speculation
    assert shaped.expansion == Expansion((1, 1, 3, 1, 1)) != trace.speculation.expansion


def test_every_piece_has_its_row_for_every_kind(
    script: Any, traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out = script("policy_ablation"), tmp_path / "page.md"
    options = ["--traces", *traces, "--at-once", 2, "--curves", "dear: 1:10,2:20,64:640 | 1:9,64:90"]
    monkeypatch.setattr(sys, "argv", ["policy_ablation.py", *map(str, options), "--out", str(out)])
    module.main()
    lines = out.read_text().splitlines()
    assert lines.count("| without | chat | code | in turns | at once |") == 2
    for name in [*module.pieces()][1:]:
        rows = [line for line in lines if line.startswith(f"| {name} |")]
        assert [row.count("[") for row in rows] == [4, 4], name


def test_curves_are_read_or_refused_in_one_line(script: Any) -> None:
    module = script("policy_ablation")
    name, target, draft = module.curves_of("two cores: 1:10,4:20 | 1:2.5,8:9")
    assert (name, target.rows, target.at_rows) == ("two cores", (1, 4), (0.01, 0.02))
    assert (draft.rows, draft.at_rows) == ((1, 8), (0.0025, 0.009))
    with pytest.raises(argparse.ArgumentTypeError, match="allowed: a name, a colon and a space"):
        module.curves_of("two cores: 1:10,4:20")
