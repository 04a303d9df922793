"""benchmarks/policy_ablation.py: what is left out is left out, and there again afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer.replay.recorder import record
from specinfer.replay.replay import simulated_engine
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace, write_trace
from specinfer.sampling_params import SamplingParams
from specinfer.speculate import ensemble
from specinfer.speculate.policy import cost_policy, draft_starts, estimator, features, plain_weighing
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.plain_steps import PlainSteps
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.speculate.speculator import LevelOutcome
from specinfer.tree.expansion import Expansion
from tests.engines import write_tiny
from tests.unit.speculate.policy.priced import FREE

# What is seen of each piece, by what is left out.
SEEN: dict[str, Callable[[], object]] = {
    "weights to begin with": lambda: any(estimator.prior(2)),
    "who denies a guess": lambda: features._denied.__name__,
    "half the odds beside drafts": lambda: plain_weighing.BESIDE,
    "doubt when a draft starts": lambda: cost_policy._DOUBT,
    "lookups behind drafts' ends": lambda: ensemble.likely_ends.__name__,
    "rates of a request's own": lambda: known_draft().rate(0, "1") != known_draft().rate(0, "2"),
    "rates of a temperature": lambda: known_draft().rate(0, None, 0.0) != known_draft().rate(0, None, 1.5),
    "reading shared among steps": lambda: draft_starts._part(1.0, 1.0, 1.0, 100),
    "steps that others' guesses save": lambda: draft_starts._part(0.5, 0.5, 8.0, 100),
    "what drafts find out later": lambda: learns_later(),
    "curiosity": lambda: draft_starts._CURIOSITY,
    "the guard": lambda: (Guard().allows(1, 0.0, new=False), PlainSteps().due(1, 1.0)),
}


def known_draft() -> DraftCosts:
    """One that is right for the first request, a greedy one, and wrong for the second one, which is hot."""
    draft = DraftCosts(FREE, Expansion((1,)))
    for _ in range(20):
        draft.learn(LevelOutcome("1", 0, 0), 0.0)
        draft.learn(LevelOutcome("2", 0, None), 1.5)
    return draft


def learns_later() -> bool:
    """Whether a policy learns from places at which a draft was not asked."""
    draft = DraftCosts(FREE, Expansion((1,)))
    policy = cost_policy.CostPolicy(FREE, {"draft": draft}, Estimator(logistics=False))
    before = draft.rate(0)
    policy.observe(StepReport([], hindsight={"draft": [LevelOutcome("0", 0, None)] * 20}))
    return draft.rate(0) != before


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


@pytest.mark.parametrize("name", SEEN)
def test_a_piece_is_left_out_and_there_again(script: Any, name: str) -> None:
    piece, seen = script("policy_ablation").pieces()[name], SEEN[name]
    before = seen()
    with piece.without():
        assert seen() != before
    assert seen() == before


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
    assert pieces["logistics beside counts"].policy is not pieces["nothing"].policy


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
