"""Figures learned in one engine, used by another engine of the same models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.speculate.policy import memory as policy_memory
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.allowance import Allowance
from specinfer.speculate.policy.guard import PLAIN_FIRST, PlainSteps
from specinfer.speculate.policy.memory import stored_policies
from tests.engines import ENGINE, engine_of
from tests.tiny_models import write_tiny_llama

DUE = PlainSteps.due
PARAMS = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(autouse=True)
def _soon(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One outcome is enough to store, and speculation is always allowed."""
    monkeypatch.setattr(policy_memory, "MIN_OUTCOMES", 1)
    monkeypatch.setattr(Allowance, "allows", lambda *_, **__: True)
    monkeypatch.setattr(PlainSteps, "due", lambda *_: False)


def opened(folder: Path, **options: Any) -> LLM:
    given = {**ENGINE, "kernels": "torch", "tree_size": "cost", "lookup": True, **options}
    return LLM(str(folder / "target"), drafts=(str(folder / "draft"),), **given)


def answered(folder: Path, **options: Any) -> str:
    with opened(folder, **options) as llm:
        [output] = llm.generate(["(1,2)(1,2)"], PARAMS)
    return output.text


def learnt() -> AcceptanceRates:
    [(_, stored, why)] = stored_policies()
    assert stored is not None, why
    acceptance = AcceptanceRates({"draft": 4})
    policy_memory.recall(stored.learned, acceptance)
    return acceptance


def test_what_one_engine_has_learnt_the_next_one_adds_to(folder: Path) -> None:
    first = answered(folder)
    once = learnt().outcomes
    assert once > 0
    assert answered(folder) == first, "texts do not depend on what was learnt"
    assert learnt().outcomes > once


def test_two_models_in_folders_of_one_name_share_nothing(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "models"
    shutil.copytree(folder, other)
    write_tiny_llama(other / "target", seed=9, tokenizer=True)
    answered(folder)
    answered(other)
    files = [file for file, *_ in stored_policies()]
    assert len(files) == 2
    assert not any(str(folder) in file.read_text() for file in files), "names without folders"


def test_by_the_curves_clock_nothing_is_known_nor_kept(folder: Path) -> None:
    answered(folder, clock="curve")
    assert stored_policies() == []
    answered(folder)
    kept = learnt().outcomes
    with opened(folder, clock="curve") as llm:
        assert engine_of(llm)._memory is None
    assert learnt().outcomes == kept


def test_a_second_process_speculates_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainSteps, "due", DUE)
    plain = []
    for _ in range(2):
        with opened(folder) as llm:
            llm.generate(["(1,2)(1,2)"], PARAMS)
            plain.append(engine_of(llm).statistics().speculation_off_steps)
    assert plain[0] >= PLAIN_FIRST
    assert plain[1] < PLAIN_FIRST, "the time of plain steps is known"
