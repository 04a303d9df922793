"""Ranks along held-out answers, level by level, against all logits at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.models.open_model import open_model
from specinfer.tune.dataset import TunedText, anchors_of, block_batch
from specinfer.tune.draft import TrainableDraft, entries_of
from specinfer.tune.evaluation import MAX_WIDTH, NOT_RANKED, rank_tokens
from specinfer.tune.head_draft import BlockHeadDraft, BlockKind
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
