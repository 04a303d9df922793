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
NEVER: Final = 1 << 40  # the rank of what a draft cannot name, or is not asked
WIDEST: Final = 8  # guesses a level of the widest tree that is looked at


@dataclass(frozen=True, slots=True)
class Figures:
    """How often guesses are right, at places of held-out answers."""

    hits: tuple[float, ...]  # of each level's first guess, where all before it were right
    first_three: float  # how often the token is among the first level's three likeliest
    tokens_per_pass: float  # of the target's, with a chain of first guesses: 1 without any luck
    places: int
    pooled: float | None = None  # the same beside chains of the members before it; None: there are none

    @property
    def worth(self) -> float:
        """By which drafts of one training are compared."""
        return self.tokens_per_pass if self.pooled is None else self.pooled


@dataclass(frozen=True, slots=True, eq=False)
class Along:
    """How likely a draft thought the tokens that came, at places of held-out answers.

    P places, L levels.
    """

    # int64: how many tokens it thought likelier. `NEVER` where it cannot name it, and behind a token that was
    # not among the `WIDEST` likeliest: so far down no tree is right.
    ranks_PL: Tensor
    texts_P: Tensor  # int64: the text each place is of

    def accepted(self, widths: Sequence[int]) -> Tensor:
        """How many levels of a tree with so many guesses a level are right from the root on, int64 [P].

        At most as many as there are levels here.
        """
        assert max(widths, default=0) <= WIDEST
        levels = min(len(widths), self.ranks_PL.shape[1])
        right_PL = self.ranks_PL[:, :levels] < torch.tensor(widths[:levels])
        return right_PL.cumprod(dim=1).sum(dim=1)


def held_out_texts(corpus: Corpus) -> list[TunedText]:
    """The first of what is held out, and what is learnt from where nothing is held out yet."""
    held_out = corpus.count(held_out=True) > 0
    count = min(_TEXTS, corpus.count(held_out=held_out))
    texts = [corpus.text(number, held_out=held_out) for number in range(count)]
    return [text for text in texts if text.answer > 1]


@torch.inference_mode()
def along(draft: Draft, texts: Sequence[TunedText]) -> Along:
    """What a draft makes of the texts' tokens; the same places for every draft, and every time."""
    entry_V = entries_of(draft)
    ranks: list[Tensor] = [torch.zeros(0, draft.depth, dtype=torch.int64)]
    of_texts: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
    for first, batch in _batches(draft, texts):
        h_BALD = draft.guessed(batch, draft.depth)
        wanted_BAL = torch.where(batch.valid_BAL, entry_V[batch.next_BAL], -1)
        ranks_BAL = torch.full_like(wanted_BAL, NEVER)
        alive_BA = torch.ones_like(wanted_BAL[..., 0], dtype=torch.bool)
        for level in range(draft.depth):
            alive_BA &= wanted_BAL[..., level] >= 0
            logits_RU = draft.logits(h_BALD[alive_BA, level], batch.before_BAL[alive_BA, level])
            theirs_R1 = logits_RU.gather(1, wanted_BAL[alive_BA, level][:, None])
            ranks_BAL[alive_BA, level] = (logits_RU > theirs_R1).sum(dim=1)
            alive_BA &= ranks_BAL[..., level] < WIDEST
        anchors = batch.valid_BAL[..., 0]
        ranks.append(ranks_BAL[anchors])
        of_texts.append(first + anchors.nonzero()[:, 0])
    return Along(torch.cat(ranks), torch.cat(of_texts))


def measure(draft: Draft, texts: Sequence[TunedText], earlier: Sequence[Along] = ()) -> Figures:
    """The figures of a draft; `earlier` are other members of its pool, along the same texts."""
    return figures_of(along(draft, texts), earlier)


def figures_of(own: Along, earlier: Sequence[Along] = ()) -> Figures:
    """The figures of a draft of which this is known."""
    places, depth = own.ranks_PL.shape
    if not places:
        return Figures((0.0,) * depth, 0.0, 1.0, 0)
    chain_P = own.accepted((1,) * depth)
    reached = [int((chain_P >= level).sum()) for level in range(depth + 1)]
    hits = tuple(reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(depth))
    longest_P = chain_P
    for other in earlier:
        longest_P = torch.maximum(longest_P, other.accepted((1,) * other.ranks_PL.shape[1]))
    among_three = float((own.ranks_PL[:, 0] < 3).double().mean())
    pooled = 1.0 + float(longest_P.double().mean()) if earlier else None
    return Figures(hits, among_three, 1.0 + float(chain_P.double().mean()), places, pooled)


def _batches(draft: Draft, texts: Sequence[TunedText]) -> Iterator[tuple[int, Blocks]]:
    """Blocks of some places of a few texts at a time, behind the number of the first of these."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        anchors = [anchors_of(text, _ANCHORS, generator) for text in part]
        yield start, blocks(part, anchors, draft.depth, draft.scale_ND)


def entries_of(draft: Draft) -> Tensor:
    """Where each of the target's tokens is among those the draft can name, int64 [V]; -1: it cannot."""
    entry_V = torch.full((draft.vocab,), -1, dtype=torch.int64)
    entry_V[draft.ids] = torch.arange(len(draft.ids))
    return entry_V
