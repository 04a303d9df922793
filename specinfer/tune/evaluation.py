"""Evaluation of drafts along held-out answers.

The answers are greedy, so a guess is right if it equals the next token. A chain of the draft's first guesses
gains as many tokens as are right from its start on, which is the number an engine would accept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.heads.checkpoint import is_head, open_head
from specinfer.heads.mtp import MtpFile, is_mtp
from specinfer.heads.mtp_head import mtp_head
from specinfer.hub import resolve
from specinfer.models.open_model import OpenModel, open_model
from specinfer.tokenizer.vocabulary import Vocabulary
from specinfer.tune.dataset import BlockBatch, Corpus, TunedText, anchors_of, block_batch
from specinfer.tune.draft import Target, TrainableDraft, entries_of
from specinfer.tune.head_draft import wrap_head
from specinfer.tune.small_model import read_small

_TEXTS: Final = 64
_ANCHORS: Final = 32  # per text
_BATCH_TEXTS: Final = 4  # texts per batch
NOT_RANKED: Final = 1 << 40  # rank of a token outside the draft's vocabulary, or one not computed
MAX_WIDTH: Final = 8  # maximum guesses per node in an evaluated tree


@dataclass(frozen=True, slots=True)
class Figures:
    """Accuracy of guesses along held-out answers."""

    # per level: probability that the first guess is right, given that all before it were
    hits: tuple[float, ...]
    first_three: float  # probability that the token is among the first level's three likeliest
    tokens_per_pass: float  # tokens per target pass with a chain of first guesses; at least 1
    places: int
    # the same with the longest chain of this draft and the earlier members; None: no pool
    pooled: float | None = None

    @property
    def worth(self) -> float:
        """The number by which drafts of one training are compared."""
        return self.tokens_per_pass if self.pooled is None else self.pooled


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanks:
    """Ranks that a draft gives to the true tokens along held-out answers.

    P positions, L levels.
    """

    # int64: number of tokens the draft ranks higher. `NOT_RANKED` outside its vocabulary, and after a token
    # outside the `MAX_WIDTH` likeliest, where no evaluated tree is right.
    token_ranks_PL: Tensor

    def accepted(self, widths: Sequence[int]) -> Tensor:
        """Number of accepted levels of a tree with these widths, int64 [P].

        Limited to the levels measured here.
        """
        assert max(widths, default=0) <= MAX_WIDTH
        levels = min(len(widths), self.token_ranks_PL.shape[1])
        right_PL = self.token_ranks_PL[:, :levels] < torch.tensor(widths[:levels])
        return right_PL.cumprod(dim=1).sum(dim=1)


def held_out_texts(corpus: Corpus) -> list[TunedText]:
    """The first held-out texts, or the first training texts if nothing is held out yet."""
    held_out = corpus.count(held_out=True) > 0
    count = min(_TEXTS, corpus.count(held_out=held_out))
    return [corpus.text(number, held_out=held_out) for number in range(count)]


@torch.inference_mode()
def rank_tokens(draft: TrainableDraft, texts: Sequence[TunedText]) -> TokenRanks:
    """Rank the true tokens of the texts; every call uses the same positions."""
    entry_V = entries_of(draft)
    ranks: list[Tensor] = [torch.zeros(0, draft.depth, dtype=torch.int64)]
    for batch in _batches(draft, texts):
        h_BALD = draft.level_states(batch, draft.depth)
        wanted_BAL = torch.where(batch.valid_BAL, entry_V[batch.next_BAL], -1)
        ranks_BAL = torch.full_like(wanted_BAL, NOT_RANKED)
        alive_BA = torch.ones_like(wanted_BAL[..., 0], dtype=torch.bool)
        for level in range(draft.depth):
            alive_BA &= wanted_BAL[..., level] >= 0
            logits_RU = draft.logits(h_BALD[alive_BA, level], batch.before_BAL[alive_BA, level])
            true_R1 = logits_RU.gather(1, wanted_BAL[alive_BA, level][:, None])
            ranks_BAL[alive_BA, level] = (logits_RU > true_R1).sum(dim=1)
            alive_BA &= ranks_BAL[..., level] < MAX_WIDTH
        ranks.append(ranks_BAL[batch.valid_BAL[..., 0]])
    return TokenRanks(torch.cat(ranks))


def measure(draft: TrainableDraft, texts: Sequence[TunedText], earlier: Sequence[TokenRanks] = ()) -> Figures:
    """Figures of a draft; `earlier` are other members of its pool along the same texts."""
    return figures_of(rank_tokens(draft, texts), earlier)


def figures_of(own: TokenRanks, earlier: Sequence[TokenRanks] = ()) -> Figures:
    """Figures from ranks."""
    places, depth = own.token_ranks_PL.shape
    if not places:
        return Figures((0.0,) * depth, 0.0, 1.0, 0)
    chain_P = own.accepted((1,) * depth)
    reached = [int((chain_P >= level).sum()) for level in range(depth + 1)]
    hits = tuple(reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(depth))
    longest_P = chain_P
    for other in earlier:
        longest_P = torch.maximum(longest_P, other.accepted((1,) * other.token_ranks_PL.shape[1]))
    among_three = float((own.token_ranks_PL[:, 0] < 3).double().mean())
    pooled = 1.0 + float(longest_P.double().mean()) if earlier else None
    return Figures(hits, among_three, 1.0 + float(chain_P.double().mean()), places, pooled)


def _batches(draft: TrainableDraft, texts: Sequence[TunedText]) -> Iterator[BlockBatch]:
    """Blocks at some positions of a few texts at a time."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(texts), _BATCH_TEXTS):
        part = texts[start : start + _BATCH_TEXTS]
        anchors = [anchors_of(text, _ANCHORS, generator) for text in part]
        yield block_batch(part, anchors, draft.depth, draft.scale_ND)


def read_draft(folder: Path, target: Target, depth: int) -> TrainableDraft:
    """Read the head or small model in a folder, for unscaled hidden states.

    `depth` is the number of measured levels of a small model or an MTP layer; other heads have their own.
    Raises ModelError or a subclass if it cannot be used.
    """
    if is_mtp(files := resolve(str(folder))):
        head = mtp_head(MtpFile(files, target.config), target.model, depth)
        return wrap_head(head, torch.ones(1, target.config.hidden_size))
    if not is_head(folder):
        return read_small(_open_small(folder, target), depth)
    opened = open_head(folder, target.model).module(target.model)
    taps = len(opened.config.taps), opened.config.target_hidden_size
    return wrap_head(opened, torch.ones(taps))


def _open_small(folder: Path, target: Target) -> OpenModel:
    """Open a language model with the target's tokens; reads no weights."""
    files = resolve(str(folder))
    small = open_model(files)
    sizes = small.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1] or not Vocabulary(target.files).same_ids(Vocabulary(files)):
        have = f"{sizes[0]} tokens, and {target.name} {sizes[1]}"
        if sizes[0] == sizes[1]:
            have = f"other tokens than {target.name}, though as many"
        raise ModelError(f"{folder} has {have}; drafts that are measured have their target's vocabulary")
    return small
