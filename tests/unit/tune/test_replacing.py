"""A tuned draft replaces an older one if it is clearly better; otherwise a line has the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specinfer.errors import ModelError, ModelFileError, TuneError
from specinfer.heads.checkpoint import is_head
from specinfer.hub.pool import write_pool
from specinfer.tune.evaluation import Incumbent, replace_folder
from specinfer.tune.tuning import Tuning
from tests.tiny_models import write_tiny_llama
from tests.unit.tune.conftest import tuning_of
from tests.unit.tune.runs import BLOCK, SSM, run
from tests.unit.tune.test_small_model import opened

pytestmark = pytest.mark.thorough


def test_a_folder_takes_anothers_place_whole(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, text in ((new, "better"), (old, "worse")):
        (folder / "member1").mkdir(parents=True)
        (folder / "member1" / "config.json").write_text(text)
        (folder / "pool.json").write_text(text)
    (new / "work").mkdir()
    (new / "member1" / "work").mkdir()
    (old / "only-here").write_text("")
    replace_folder(new, old)
    assert (old / "pool.json").read_text() == (old / "member1" / "config.json").read_text() == "better"
    assert sorted(one.name for one in old.iterdir()) == ["member1", "pool.json"]
    before = tmp_path / "old.before"
    assert (before / "pool.json").read_text() == "worse"
    (new / "pool.json").write_text("best")
    replace_folder(new, old)
    assert (before / "pool.json").read_text() == "better"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new", "old", "old.before"]


def test_a_better_draft_replaces_a_worse_one_of_another_kind(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """A small model that has hardly learnt anything gives way to a head, and the head stays afterwards."""
    config = tuning_of(target, tmp_path / "poor", minutes=0.5, kind=SSM, init="random")
    run(config, prompts)
    poor = tmp_path / "poor"
    shutil.rmtree(poor / "work")
    _, lines = run(tuning_of(target, tmp_path / "head", minutes=3.0, kind=BLOCK, replace=poor), prompts)
    assert any(line.startswith(f"{poor} is replaced: on ") for line in lines)
    assert is_head(poor)
    assert (poor / "model.safetensors").read_bytes() == (tmp_path / "head" / "model.safetensors").read_bytes()
    assert (tmp_path / "poor.before" / "tokenizer.json").exists()
    # A small model for whose sake no hidden states are collected is held against the head, which reads them.
    weak = tuning_of(target, tmp_path / "weak", minutes=0.5, kind=SSM, init="random", replace=poor)
    _, lines = run(weak, prompts)
    summary = [line for line in lines if line.startswith(f"{poor} stays: on ")]
    assert len(summary) == 1
    assert "is not more than its standard error" in summary[0]
    assert is_head(poor)


def test_what_cannot_be_replaced_is_refused(target: Path, tmp_path: Path) -> None:
    source = opened(target)
    with pytest.raises(
        TuneError, match=r"the folder of the draft to replace, .*missing, does not exist; give --out alone"
    ):
        Incumbent(tmp_path / "missing", source)
    (tmp_path / "lost.before").mkdir()
    with pytest.raises(TuneError, match=r"lost.before is there: rename it"):
        Incumbent(tmp_path / "lost", source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TuneError, match="holds neither a draft nor a pool"):
        Tuning(tuning_of(target, tmp_path / "out", replace=tmp_path / "empty"))
    assert not (tmp_path / "out").exists()
    write_pool(tmp_path / "empty", ["member1"])
    with pytest.raises(ModelFileError, match="has no folder member1"):
        Incumbent(tmp_path / "empty", source)


def test_a_head_of_another_target_is_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    run(tuning_of(target, tmp_path / "head", minutes=0.5, kind=BLOCK), prompts)
    Incumbent(tmp_path / "head", opened(target))
    other = write_tiny_llama(tmp_path / "other", num_layers=3, seed=7, tokenizer=True)
    with pytest.raises(ModelError, match="for target, which has other weights than other"):
        Incumbent(tmp_path / "head", opened(other))
