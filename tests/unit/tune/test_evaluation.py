"""Ranks along held-out answers against all logits at once, and an EAGLE head's rows in training."""

from pathlib import Path

import pytest
import torch

from specinfer.models.open_model import open_model
from specinfer.tune.dataset import TunedText, anchors_of, block_batch
from specinfer.tune.draft import TrainableDraft, entries_of
from specinfer.tune.evaluation import MAX_WIDTH, NOT_RANKED, rank_tokens
from specinfer.tune.head_draft import BlockHeadDraft, BlockKind, EagleHeadDraft, EagleKind
from specinfer.tune.initial_head import new_head
from specinfer.tune.small_model import SsmKind
from tests.unit.tune.test_small_model import opened


def wrap_head(kind: str, target: Path) -> TrainableDraft:
    if kind == "ssm":
        return SsmKind(layers=1, depth=3).blank(opened(target), torch.ones(0, 32), [])
    model = open_model(target)
    shape = BlockKind(depth=3, vocabulary=40, markov_rank=4)
    head = new_head(shape.config(model.config), model, [*range(40)], seed=1)
    return BlockHeadDraft(head, torch.ones(3, 32))


@pytest.mark.parametrize("kind", ["ssm", "block"])
def test_ranks_are_those_of_all_logits(kind: str, target: Path) -> None:
    draft, chance = wrap_head(kind, target), torch.Generator().manual_seed(1)
    texts = []
    for key in range(6):
        tokens = torch.randint(12, (14 - key,), generator=chance)
        taps = torch.randn(len(tokens) - 1, len(draft.scale_ND), 32, generator=chance)
        rows = len(tokens) - 3
        labels = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 2)
        texts.append(TunedText(tokens, 3, taps, *labels, key, True))
    found = rank_tokens(draft, texts)
    expected: list[list[int]] = []
    for text in texts:
        batch = block_batch([text], [anchors_of(text, 99, torch.Generator())], 3, draft.scale_ND)
        with torch.no_grad():
            logits = draft.logits(draft.level_states(batch, 3), batch.before_BAL)[0]
        for place in range(logits.shape[0]):
            ranks, alive = [], True
            for level in range(3):
                entry = int(entries_of(draft)[batch.next_BAL[0, place, level]])
                alive = alive and bool(batch.valid_BAL[0, place, level]) and entry >= 0
                row = logits[place, level]
                ranks.append(int((row > row[entry]).sum()) if alive else NOT_RANKED)
                alive = alive and ranks[-1] < MAX_WIDTH
            expected.append(ranks)
    assert found.token_ranks_PL.tolist() == expected
    early = sum(row[1] == NOT_RANKED for row in expected)
    assert 0 < early < len(expected), "some trees end early, some do not"


def test_along_a_text_it_guesses_as_where_the_text_ends(target: Path) -> None:
    """At an anchor within a text each level reads what it reads where there are no rows behind it."""
    opened = open_model(target)
    config = EagleKind(depth=3, vocabulary=48).config(opened.config)
    head = new_head(config, opened, list(range(48)), 1)
    chance = torch.Generator().manual_seed(2)
    tokens = torch.randint(64, (12,), generator=chance)
    taps = torch.randn(11, 3, opened.config.hidden_size, generator=chance)
    labels = torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, 4)
    text = TunedText(tokens, 4, taps, *labels, key=1, held_out=False)
    places = torch.tensor([4, 6, 8])
    with torch.no_grad():
        batch = block_batch([text], [places], 3, torch.ones(taps.shape[1:]))
        along_ALD = EagleHeadDraft(head, torch.ones(taps.shape[1:])).level_states(batch, 3)[0]
        for number, place in enumerate(places.tolist()):
            ids_TS = torch.stack([tokens[1 + step : 1 + step + place] for step in range(3)], dim=-1)
            alone_LD = head(ids_TS[None], taps[None, :place])[0, -1]
            assert (alone_LD - along_ALD[number]).abs().max() < 1e-5
            assert batch.before_BAL[0, number].tolist() == ids_TS[-1].tolist()
