"""Whole tunings of a tiny target and of pools: results, continued runs, early ends, and kills."""

import errno
import json
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.errors import ModelError, TuneError
from specinfer.heads.checkpoint import HeadFolder
from specinfer.hub.model_files import pool_members
from specinfer.models.open_model import open_model
from specinfer.tune import training
from specinfer.tune.dataset import Corpus, TrainingSet
from specinfer.tune.draft import Kind
from specinfer.tune.evaluation import Figures, held_out_texts, measure, read_draft
from specinfer.tune.head_draft import BlockHeadDraft, BlockKind, EagleKind, MtpKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.small_model import SsmKind
from specinfer.tune.trainer import Trainer
from specinfer.tune.training import read_checkpoint
from specinfer.tune.tuning import TuneConfig, Tuning
from tests.unit.tune import conftest as made
from tests.unit.tune.conftest import SHAPE, SSM, KilledError, outputs_with, run, ticking, tuning_of
from tests.unit.tune.test_small_model import opened

pytestmark = pytest.mark.thorough

_CHECKPOINT = "work/checkpoint.safetensors"


KINDS = [SHAPE, EagleKind(depth=3, vocabulary=48), MtpKind(depth=3), SsmKind(layers=2, depth=3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_learns_and_is_exported(target: Path, prompts: Path, tmp_path: Path, kind: Kind) -> None:
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
    found = iter([Figures((0.1,) * 4, 0.2, worth, 5) for worth in (1.5, 2.5, 2.0, 1.0, *[1.0] * 9)])
    monkeypatch.setattr("specinfer.tune.training.measure", lambda *_: next(found))
    config = tuning_of(target, tmp_path / "head")
    _, lines = run(config, prompts, ticking(3.0))
    improved = [line.endswith("the best so far") for line in lines if "held out: first" in line]
    assert improved == [True, True, *[False] * (len(improved) - 2)]
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


def test_a_run_in_two_parts_learns_what_one_run_learns(target: Path, prompts: Path, tmp_path: Path) -> None:
    config = tuning_of(target, tmp_path / "head", minutes=4.0)
    tuning = Tuning(config, clock=ticking())
    tuning._collect(read_prompts([prompts]))
    dataset = TrainingSet(tuning._corpus)

    def trained(steps: int) -> Trainer:
        trainer = tuning._training(dataset, []).trainer
        for _ in range(steps):
            trainer.step(dataset, 1.0)
        return trainer

    whole = trained(6)
    training.write_checkpoint(config.out / _CHECKPOINT, trained(3))
    second = trained(3)
    assert second.state.steps == whole.state.steps
    for name, parameter in whole.draft.module.named_parameters():
        assert torch.allclose(parameter, second.draft.module.get_parameter(name), atol=1e-6), name
    for name, average in whole.average.items():
        assert torch.allclose(average, second.average[name], atol=1e-6), name


def test_a_full_disk_is_told_and_what_was_kept_stays(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tuning_of(target, tmp_path / "head", minutes=4.0)
    write, fits = training.write_safetensors, iter([True, False])

    def fills(path: Path, *rest: Any, **more: Any) -> None:
        if not next(fits, True):
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


def test_other_folders_are_refused(tuned: Path, target: Path, prompts: Path, tmp_path: Path) -> None:
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


_MINUTES = 0.06  # length of the first run, a third of it for collecting; each later run adds the same
_PATIENCE = 120.0  # seconds until a run writes the file
# Files after which a run is killed: its claim, its first draft, a checkpoint.
_SEEN = ("work/tuning.json", "config.json", "work/checkpoint.safetensors")
_SMALL = "--dtype float32 --kv-cache-memory 16MB --max-context 64 --max-tokens 8 --raw --vocabulary 32"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_is_killed_goes_on_and_ends_with_a_draft(target: Path, prompts: Path, tmp_path: Path) -> None:
    moments, out, before, kills = random.Random(0), tmp_path / "head", 0, 0
    for number, name in enumerate(_SEEN):
        minutes = _MINUTES * (1 + number)
        kills += _killed(_command(target, prompts, out, minutes), out / name, moments.uniform(0.0, 0.3))
        if (out / "config.json").exists():
            opened = open_model(target)
            HeadFolder(out, opened.config).module(opened)  # whole, as the kill left it
        steps = _steps(out)
        assert steps >= before, "what a checkpoint had is not lost"
        before = steps
    assert before > 0
    assert kills > 1, "most runs were not at their end"
    ending = _command(target, prompts, out, _MINUTES * (1 + len(_SEEN)))
    done = subprocess.run(ending, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"--draft {out}" in done.stdout
    assert _steps(out) > before
    assert "## What it is worth" in (out / "README.md").read_text()
    [output] = outputs_with(out, target, prompts=["2 * 3"])
    assert sum(output.figures.drafted_per_depth) > 0, "and it has guessed"


def _command(target: Path, prompts: Path, out: Path, minutes: float) -> list[str]:
    resume = ["--resume"] if (out / "work" / "tuning.json").exists() else []
    named = ["--model", str(target), "--prompts", str(prompts), "--out", str(out), *_SMALL.split()]
    named += ["--depth", "3"]
    return [sys.executable, "-m", "specinfer", "tune", *named, "--minutes", str(minutes), *resume]


def _killed(command: list[str], seen: Path, later: float) -> bool:
    """Kill a run `seconds` after it has written a file; return False if it ended before."""
    old = _written(seen)
    deadline = time.monotonic() + _PATIENCE
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while _written(seen) == old:
                assert process.poll() is None, "it ended by itself"
                assert time.monotonic() < deadline, f"it has not written {seen.name}"
                time.sleep(0.002)
            time.sleep(later)
        finally:
            process.kill()
    assert process.returncode in (-signal.SIGKILL, 0)
    return process.returncode != 0


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _steps(out: Path) -> int:
    kept = out / "work" / "checkpoint.safetensors"
    return read_checkpoint(kept).state.steps if kept.exists() else 0


def pool_of(target: Path, out: Path, kind: Kind) -> TuneConfig:
    """Every prompt is answered, however many answers a look at the clock finds."""
    return tuning_of(target, out, minutes=2.5, collect_minutes=2.4, kind=kind, members=2)


@pytest.mark.parametrize("kind", [SSM, made.BLOCK])
def test_a_pool_beats_its_members(target: Path, prompts: Path, tmp_path: Path, kind: Kind) -> None:
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
    collected, _ = made.tuning(config, lambda: 0.0)
    collected.collect(read_prompts([prompts]))
    again = replace(config, resume=True)
    states: list[list[int]] = []
    for steps in (110, 90, 60):
        with pytest.raises(KilledError):
            run(again, prompts, made.dies_at(steps))
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
