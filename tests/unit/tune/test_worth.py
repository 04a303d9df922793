"""Cost and gain of a single draft: in the report, on its card, at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.tune.prompts import read_prompts
from specinfer.tune.selection import Costs, TuneResult
from specinfer.tune.tuning import Tuning
from tests.unit.tune.conftest import ticking, tuning_of
from tests.unit.tune.runs import BLOCK, cheap

pytestmark = pytest.mark.thorough


def tuned(
    target: Path, prompts: Path, out: Path, costs: Costs, **changes: object
) -> tuple[TuneResult, list[str]]:
    lines: list[str] = []
    config = tuning_of(target, out, **({"kind": BLOCK} | changes))
    tuning = Tuning(config, clock=ticking(), say=lines.append, costs=costs)
    return tuning.run(read_prompts([prompts]), [prompts.name]), lines


def test_a_draft_that_pays_is_said_to(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    outcome, lines = tuned(target, prompts, out, cheap, minutes=4.0)
    selection, best = outcome.selection, outcome.selection.best
    assert selection.pays
    assert best.drafting_seconds == pytest.approx(0.001, rel=0.2)
    assert selection.ratio(best) == pytest.approx(best.tokens_per_step * 0.01 / best.step_seconds)
    assert lines[-2] == "a pass of the target takes 10.00 ms for one token: 100.0 tokens/s without a draft"
    assert lines[-1].startswith(f"head: {best.tokens_per_step:.3f} tokens per step of ")
    assert (
        f"{best.tokens_per_second:.1f} tokens/s ({selection.ratio(best):.3f} times no speculation)"
        in lines[-1]
    )
    card = (out / "README.md").read_text()
    assert "It pays on this machine" in card
    assert all(f"- {line}\n" in card for line in lines[-2:])
    assert outcome.figures.tokens_per_pass > 1
