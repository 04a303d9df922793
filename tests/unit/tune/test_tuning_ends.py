"""Tunings that are gone on with, out of time or disk, or refused."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.errors import ModelError, TuneError
from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.open_model import open_model
from specinfer.tune import training
from specinfer.tune.dataset import TrainingSet
from specinfer.tune.draft import Kind
from specinfer.tune.head_draft import BlockKind, EagleKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.small_model import SsmKind
from specinfer.tune.training import read_checkpoint
from specinfer.tune.tuning import TuneConfig, Tuning
from tests.unit.tune.conftest import SHAPE, run, ticking, tuning_of

pytestmark = pytest.mark.thorough

_CHECKPOINT = "work/checkpoint.safetensors"


def test_a_run_in_two_parts_learns_what_one_run_learns(target: Path, prompts: Path, tmp_path: Path) -> None:
    config = tuning_of(target, tmp_path / "head", minutes=4.0)
    tuning = Tuning(config, clock=ticking())
    tuning._collect(read_prompts([prompts]))
    dataset = TrainingSet(tuning._corpus)
    whole = tuning._training(dataset, []).trainer
    for _ in range(6):
        whole.step(dataset, 1.0)
    first = tuning._training(dataset, []).trainer
    for _ in range(3):
        first.step(dataset, 1.0)
    path = config.out / _CHECKPOINT
    training.write_checkpoint(path, first)
    second = tuning._training(dataset, []).trainer
    for _ in range(3):
        second.step(dataset, 1.0)
    assert second.state.steps == whole.state.steps
    for name, parameter in whole.draft.module.named_parameters():
        assert torch.allclose(parameter, second.draft.module.get_parameter(name), atol=1e-6), name
    for name, average in whole.average.items():
        assert torch.allclose(average, second.average[name], atol=1e-6), name


def test_a_full_disk_is_told_and_what_was_kept_stays(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tuning_of(target, tmp_path / "head", minutes=4.0)
    written = 0
    write = training.write_safetensors

    def fills(path: Path, *rest: Any, **more: Any) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, *rest, **more)

    monkeypatch.setattr(training, "write_safetensors", fills)
    with pytest.raises(TuneError, match=r"cannot write to .*No space left on device.*--resume"):
        run(config, prompts, ticking(8.0))
    kept = read_checkpoint(config.out / _CHECKPOINT).state
    assert len(kept.history) == 1
    HeadFolder(config.out, open_model(target).config)
    run(replace(config, resume=True), prompts, ticking(8.0))
    assert len(read_checkpoint(config.out / _CHECKPOINT).state.history) > 1


def test_folders_that_are_something_else_are_refused(
    tuned: Path, target: Path, prompts: Path, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    (pool / "work").mkdir(parents=True)
    facts = json.loads((tuned / "work/tuning.json").read_text()) | {"members": 2}
    (pool / "work/tuning.json").write_text(json.dumps(facts))
    cases: list[tuple[TuneConfig, str]] = [
        (tuning_of(target, tuned), "holds a tuning already; --resume continues it"),
        (tuning_of(target, target), "holds a model already"),
        (tuning_of(target, tmp_path / "new", resume=True), "has no tuning to resume"),
        (tuning_of(target, tuned, resume=True, kind=BlockKind(depth=3)), "the tuning in .* has head"),
        (tuning_of(target, pool, resume=True), "the tuning in .* has members 2, and this one has None"),
    ]
    for config, words in cases:
        with pytest.raises(TuneError, match=words):
            Tuning(config)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", [SHAPE, EagleKind(depth=4, vocabulary=48), SsmKind(layers=1, depth=4)])
def test_what_a_draft_cannot_begin_as_is_refused_before_anything_is_collected(
    tuned: Path, target: Path, prompts: Path, tmp_path: Path, kind: Kind
) -> None:
    """And the folder is free for the corrected command."""
    out = tmp_path / "head"
    other = target if kind is SHAPE else tuned  # a model in place of a head, and the other way round
    with pytest.raises(ModelError, match="no model is called 'typo'"):
        Tuning(tuning_of(target, out, kind=kind, init="typo"))
    with pytest.raises(TuneError, match=r"is not a draft head|is a draft head|differs in shape"):
        Tuning(tuning_of(target, out, kind=kind, init=str(other)))
    assert not out.exists()
    Tuning(tuning_of(target, out, kind=kind))


def test_a_damaged_checkpoint_is_told(target: Path, prompts: Path, tmp_path: Path) -> None:
    config = tuning_of(target, tmp_path / "head")
    run(config, prompts, ticking(20.0))
    path = config.out / _CHECKPOINT
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(TuneError, match=r"checkpoint.safetensors is damaged .*remove it"):
        run(replace(config, resume=True, minutes=3.0), prompts)
