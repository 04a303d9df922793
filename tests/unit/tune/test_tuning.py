"""Whole tunings of a tiny target: results, continued runs and early ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.open_model import open_model
from specinfer.tune import training
from specinfer.tune.dataset import Corpus, TrainingSet
from specinfer.tune.draft import Kind
from specinfer.tune.evaluation import Figures, held_out_texts, measure, read_draft
from specinfer.tune.head_draft import BlockHeadDraft, EagleKind, MtpKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.training import read_checkpoint
from specinfer.tune.tuning import Tuning
from tests.unit.tune.conftest import SHAPE, KilledError, outputs_with, run, ticking, tuning_of
from tests.unit.tune.test_small_model import opened

pytestmark = pytest.mark.thorough

_CHECKPOINT = "work/checkpoint.safetensors"


@pytest.mark.parametrize("kind", [SHAPE, EagleKind(depth=3, vocabulary=48), MtpKind(depth=3)])
def test_a_head_learns_and_is_exported_as_it_was_measured(
    target: Path, prompts: Path, tmp_path: Path, kind: Kind
) -> None:
    run(tuning_of(target, tmp_path / "head", minutes=4.0, kind=kind), prompts)
    kept = read_checkpoint(tmp_path / "head" / _CHECKPOINT).state
    assert len(kept.history) >= 3
    assert kept.history[-1]["loss"] < 0.9 * kept.history[0]["loss"]  # type: ignore[operator]
    texts = held_out_texts(Corpus(tmp_path / "head" / "work" / "shards"))
    found = measure(read_draft(tmp_path / "head", opened(target), kind.depth), texts)
    assert found.tokens_per_pass == pytest.approx(kept.best, abs=0.1)  # bfloat16 on disk
    assert found.tokens_per_pass > 1.05
    outputs_with(tmp_path / "head", target)


def test_what_is_exported_computes_what_was_trained(target: Path, prompts: Path, tmp_path: Path) -> None:
    tuning = Tuning(tuning_of(target, tmp_path / "head"), clock=ticking())
    tuning._collect(read_prompts([prompts]))
    dataset, texts = TrainingSet(tuning._corpus), held_out_texts(tuning._corpus)
    training = tuning._training(dataset, [])
    trainer = training.trainer
    for _ in range(8):
        trainer.step(dataset, 1.0)
    training.checkpoint()
    opened = open_model(target)
    exported = HeadFolder(tmp_path / "head", opened.config).module(opened)
    trained = trainer.averaged().module
    scale_ND = trainer.draft.scale_ND
    taps, anchors = texts[0].taps_TND[None], torch.tensor([[texts[0].prompt, texts[0].prompt + 2]])
    ids = texts[0].tokens_T[anchors]
    with torch.no_grad():
        there = exported.logits(exported(taps, ids, anchors)) + exported.pair_logits(ids)[:, :, None]
        here = trained.logits(trained(taps * scale_ND, ids, anchors))
        here += trained.pair_logits(ids)[:, :, None]
        read, unscaled = exported.fused(taps), trained.fused(taps)
        wanted = trained.fused(taps * scale_ND)
    assert torch.equal(exported.ids, trained.ids)
    assert (there - here).abs().max() < 0.05 * here.std()  # bfloat16 on disk
    assert (read - wanted).abs().max() < 0.05 * wanted.std()
    assert (unscaled - wanted).abs().max() > 0.5 * wanted.std()  # so the scale is in what was written


def test_the_best_checkpoint_is_kept_and_not_the_newest(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worth = iter([1.5, 2.5, 2.0, 1.0, *[1.0] * 9])
    monkeypatch.setattr(
        "specinfer.tune.training.measure", lambda *_: Figures((0.1,) * 4, 0.2, next(worth), 5)
    )
    config = tuning_of(target, tmp_path / "head")
    _, lines = run(config, prompts, ticking(3.0))
    improved = [line.endswith("the best so far") for line in lines if "held out: first" in line]
    assert improved[:3] == [True, True, False]
    assert not any(improved[3:])
    assert "makes 2.50 tokens per target pass" in (tmp_path / "head" / "README.md").read_text()


@pytest.mark.parametrize("writes", [0, 1])
def test_a_later_worse_one_never_replaces_what_was_exported_before_a_kill(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The kill is behind the export and before the checkpoint, which knows nothing of it."""
    best, worse = 2.5, [2.0] * 30
    worth = iter([*[1.5] * writes, best, *worse])

    def measured(draft: BlockHeadDraft, *_: Any) -> Figures:
        exported = bool((draft.scale_ND == 1).all())
        return Figures((0.1,) * 4, 0.2, best if exported else next(worth), 5)

    monkeypatch.setattr("specinfer.tune.training.measure", measured)
    left, write = iter(range(writes)), training.write_checkpoint

    def dies(*args: Any) -> None:
        if next(left, None) is None:
            raise KilledError
        write(*args)

    config = tuning_of(target, tmp_path / "head")
    monkeypatch.setattr("specinfer.tune.training.write_checkpoint", dies)
    with pytest.raises(KilledError):
        run(config, prompts, ticking(3.0))
    exported = (config.out / "model.safetensors").read_bytes()
    monkeypatch.setattr("specinfer.tune.training.write_checkpoint", write)
    run(replace(config, resume=True), prompts, ticking(3.0))
    kept = read_checkpoint(config.out / _CHECKPOINT).state
    assert len(kept.history) > writes
    assert (kept.best, kept.places) == (best, 5)
    assert (config.out / "model.safetensors").read_bytes() == exported
    assert "makes 2.50 tokens per target pass" in (config.out / "README.md").read_text()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_with_it(tuned: Path, target: Path, temperature: float) -> None:
    outputs = outputs_with(tuned, target, temperature=temperature)
    assert sum(output.figures.accepted_by.get("draft", 0) for output in outputs) > 0
