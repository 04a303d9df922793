"""What a draft is worth: its guesses along answers it has not learnt from.

These answers are greedy, so a guess is right where it is the token that came, and a chain of the draft's
first guesses gains as many tokens as are right from its beginning on: what an engine would accept of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from specinfer.tune.blocks import Blocks, anchors_of, blocks
from specinfer.tune.draft import Draft
from specinfer.tune.shards import Corpus, TunedText

_TEXTS: Final = 64
_ANCHORS: Final = 32  # of a text
_AT_ONCE: Final = 4  # texts


@dataclass(frozen=True, slots=True)
class Figures:
    """How often guesses are right, at places of held-out answers."""

    hits: tuple[float, ...]  # of each level's first guess, where all before it were right
    first_three: float  # how often the token is among the first level's three likeliest
    tokens_per_pass: float  # of the target's, with a chain of first guesses: 1 without any luck
    places: int


def held_out_texts(corpus: Corpus) -> list[TunedText]:
    """The first of what is held out, and what is learnt from where nothing is held out yet."""
    held_out = corpus.count(held_out=True) > 0
    count = min(_TEXTS, corpus.count(held_out=held_out))
    texts = [corpus.text(number, held_out=held_out) for number in range(count)]
    return [text for text in texts if text.answer > 1]


@torch.inference_mode()
def measure(draft: Draft, texts: Sequence[TunedText]) -> Figures:
    """The figures of a draft; the same places every time."""
    depth = draft.depth
    entry_V = entries_of(draft)
    right: list[Tensor] = []
    among_three = places = 0
    for batch in _batches(draft, texts):
        logits = draft.logits(draft.guessed(batch, depth), batch.before_BAL)
        wanted = torch.where(batch.valid_BAL, entry_V[batch.next_BAL], -1)
        anchors = batch.valid_BAL[..., 0]
        right.append((logits.argmax(dim=-1) == wanted)[anchors])
        likeliest = logits[:, :, 0].topk(min(3, logits.shape[-1]), dim=-1).indices
        among_three += int((likeliest == wanted[:, :, 0, None]).any(dim=-1)[anchors].sum())
        places += int(anchors.sum())
    if not places:
        return Figures((0.0,) * depth, 0.0, 1.0, 0)
    chain_PL = torch.cat(right).cumprod(dim=1).double()
    reached = torch.cat((torch.tensor([float(places)], dtype=torch.float64), chain_PL.sum(dim=0)))
    hits = [float(reached[i + 1] / reached[i]) if reached[i] else 0.0 for i in range(depth)]
    return Figures(tuple(hits), among_three / places, 1.0 + float(chain_PL.sum(dim=1).mean()), places)


def _batches(draft: Draft, texts: Sequence[TunedText]) -> Iterator[Blocks]:
    """Blocks of some places of each text, a few texts at a time; the same places every time."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        anchors = [anchors_of(text, _ANCHORS, generator) for text in part]
        yield blocks(part, anchors, draft.depth, draft.scale_ND)


def entries_of(draft: Draft) -> Tensor:
    """Where each of the target's tokens is among those the draft can name, int64 [V]; -1: it cannot."""
    entry_V = torch.full((draft.vocab,), -1, dtype=torch.int64)
    entry_V[draft.ids] = torch.arange(len(draft.ids))
    return entry_V
