"""Heads of EAGLE's kind are collected for, trained, kept and used as block heads are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.heads.checkpoint import HeadFolder
from specinfer.heads.eagle import EagleHead
from specinfer.models.open_model import open_model
from specinfer.tune.dataset import Corpus, TunedText, block_batch
from specinfer.tune.evaluation import held_out_texts, measure
from specinfer.tune.head_draft import EagleHeadDraft
from specinfer.tune.head_kinds import EagleKind
from specinfer.tune.initial_head import new_head
from specinfer.tune.prompts import read_prompts
from specinfer.tune.training import read_checkpoint
from specinfer.tune.tuning import Tuning
from tests.unit.tune.conftest import ticking, tuning_of

pytestmark = pytest.mark.thorough

SHAPE = EagleKind(depth=3, vocabulary=48)


@pytest.fixture(scope="module")
def tuned(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("eagle") / "head"
    config = tuning_of(target, out, minutes=3.0, kind=SHAPE)
    Tuning(config, clock=ticking()).run(read_prompts([prompts]), [prompts.name])
    return out


def test_it_learns_and_is_exported_as_it_was_measured(tuned: Path, target: Path) -> None:
    kept = read_checkpoint(tuned / "work" / "checkpoint.safetensors")
    history = kept.state.history
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]  # type: ignore[operator]
    opened = open_model(target)
    exported = HeadFolder(tuned, opened.config).module(opened)
    assert isinstance(exported, EagleHead)
    assert '"eagle3"' in (tuned / "config.json").read_text()
    assert "EAGLE-3 head" in (tuned / "README.md").read_text()
    texts = held_out_texts(Corpus(tuned / "work" / "shards"))
    found = measure(EagleHeadDraft(exported, torch.ones_like(kept.tensors["scale"])), texts)
    assert found.tokens_per_pass == pytest.approx(kept.state.best, abs=0.1)  # bfloat16 on disk
    assert found.tokens_per_pass > 1.05


def test_along_a_text_it_guesses_as_where_the_text_ends(target: Path) -> None:
    """At an anchor within a text each level reads what it reads where there are no rows behind it."""
    opened = open_model(target)
    config = SHAPE.config(opened.config, (0, 1, 3))
    head = new_head(config, opened, list(range(48)), 1)
    chance = torch.Generator().manual_seed(2)
    tokens = torch.randint(64, (12,), generator=chance)
    taps = torch.randn(11, 3, opened.config.hidden_size, generator=chance)
    text = TunedText(
        tokens, 4, taps, torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, 4), key=1, held_out=False
    )
    places = torch.tensor([4, 6, 8])
    with torch.no_grad():
        batch = block_batch([text], [places], 3, torch.ones(taps.shape[1:]))
        along_ALD = EagleHeadDraft(head, torch.ones(taps.shape[1:])).level_states(batch, 3)[0]
        for number, place in enumerate(places.tolist()):
            ids_TS = torch.stack([tokens[1 + step : 1 + step + place] for step in range(3)], dim=-1)
            alone_LD = head(ids_TS[None], taps[None, :place])[0, -1]
            assert (alone_LD - along_ALD[number]).abs().max() < 1e-5
            assert batch.before_BAL[0, number].tolist() == ids_TS[-1].tolist()
