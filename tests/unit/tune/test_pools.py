"""Pools: members that share collected answers and time, and what is gone on with."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from specinfer.hub.model_files import pool_members
from specinfer.tune.draft import Kind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.training import read_checkpoint
from specinfer.tune.tuning import TuneConfig
from tests.unit.tune.conftest import BLOCK, SSM, KilledError, dies_at, run, tuning, tuning_of

pytestmark = pytest.mark.thorough


def pool_of(target: Path, out: Path, kind: Kind) -> TuneConfig:
    """Every prompt is answered, however many answers a look at the clock finds."""
    return tuning_of(target, out, minutes=2.5, collect_minutes=2.4, kind=kind, members=2)


@pytest.mark.parametrize("kind", [SSM, BLOCK])
def test_a_pool_guesses_more_than_its_members(
    target: Path, prompts: Path, tmp_path: Path, kind: Kind
) -> None:
    outcome, lines = run(pool_of(target, tmp_path / "pool", kind), prompts)
    found = pool_members(tmp_path / "pool")
    assert outcome.figures.tokens_per_pass > 1
    card = (tmp_path / "pool" / "README.md").read_text()
    for number, folder in enumerate(("member1", "member2")):
        line = f"{folder} does not pay and is left out of the pool"
        assert (line in lines) is (number >= len(found))
        assert (f"- {line}" in card) is (number >= len(found))
    assert "A pool of drafts for target" in card
    assert "- a pass of the target takes 10.00 ms for one token: 100.0 tokens/s without a draft" in card
    assert "license: unknown\n---" in card
    assert re.search(r"trained on \d+ answers of the target, \d+ tokens; prompts: prompts.jsonl;", card)
    assert ("weights: embeddings and output layer" in card) is (kind is SSM)


def test_who_is_killed_goes_on_with_the_member_he_was_at(target: Path, prompts: Path, tmp_path: Path) -> None:
    config = replace(pool_of(target, tmp_path / "pool", SSM), minutes=4.0)
    # How many answers a look at the clock finds varies, so this clock stands while they are collected.
    collected, _ = tuning(config, lambda: 0.0)
    collected.collect(read_prompts([prompts]))
    again = replace(config, resume=True)
    states: list[list[int]] = []
    for steps in (110, 90, 60):
        with pytest.raises(KilledError):
            run(again, prompts, dies_at(steps))
        kept = [config.work / f"member{number}.safetensors" for number in (1, 2)]
        states.append([read_checkpoint(path).state.steps if path.exists() else 0 for path in kept])
        assert not (config.out / "pool.json").exists()
    run(again, prompts)
    firsts, seconds = zip(*states, strict=True)
    assert list(firsts) == sorted(firsts)
    assert firsts[0] > 0
    assert list(seconds) == sorted(seconds)
    assert 0 < seconds[-1] < read_checkpoint(config.work / "member2.safetensors").state.steps
    assert len(pool_members(config.out)) >= 1
    _, lines = run(again, prompts)
    assert any("minutes are spent" in line for line in lines)
