"""Rows of an EAGLE head in training are those at inference."""

from __future__ import annotations

from pathlib import Path

import torch

from specinfer.models.open_model import open_model
from specinfer.tune.dataset import TunedText, block_batch
from specinfer.tune.head_draft import EagleHeadDraft, EagleKind
from specinfer.tune.initial_head import new_head

SHAPE = EagleKind(depth=3, vocabulary=48)


def test_along_a_text_it_guesses_as_where_the_text_ends(target: Path) -> None:
    """At an anchor within a text each level reads what it reads where there are no rows behind it."""
    opened = open_model(target)
    config = SHAPE.config(opened.config)
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
