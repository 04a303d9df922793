"""What a draft is worth: its guesses along held-out answers, and whether it replaces an older draft.

These answers are greedy, so a guess is right where it is the token that came, and a chain of the draft's
first guesses gains as many tokens as are right from its beginning on: what an engine would accept of it.

A new draft replaces an older one only where its tokens a second are more by more than the standard error of
the difference, answer by answer; both are measured along the same held-out answers and at the same costs.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelError, TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head, open_head
from specinfer.heads.config import EagleConfig, MedusaConfig
from specinfer.heads.eagle import EagleHead
from specinfer.hub import resolve
from specinfer.hub.pool import is_pool, member_folders, read_pool
from specinfer.models.fingerprint import is_of
from specinfer.models.weights import OpenModel, open_model
from specinfer.tokenizer.vocabulary import Vocabulary
from specinfer.tune.dataset import BlockBatch, Corpus, TunedText, anchors_of, block_batch
from specinfer.tune.draft import Target, TrainableDraft, entries_of
from specinfer.tune.head_draft import draft_of
from specinfer.tune.small_model import read_small

_TEXTS: Final = 64
_ANCHORS: Final = 32  # of a text
_AT_ONCE: Final = 4  # texts
NEVER: Final = 1 << 40  # the rank of what a draft cannot name, or is not asked
WIDEST: Final = 8  # guesses a level of the widest tree that is looked at
BEFORE: Final = ".before"  # behind a folder's name: what it was until it was replaced


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
def along(draft: TrainableDraft, texts: Sequence[TunedText]) -> Along:
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


def measure(draft: TrainableDraft, texts: Sequence[TunedText], earlier: Sequence[Along] = ()) -> Figures:
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


def _batches(draft: TrainableDraft, texts: Sequence[TunedText]) -> Iterator[tuple[int, BlockBatch]]:
    """Blocks of some places of a few texts at a time, behind the number of the first of these."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        anchors = [anchors_of(text, _ANCHORS, generator) for text in part]
        yield start, block_batch(part, anchors, draft.depth, draft.scale_ND)


def open_draft(folder: Path, target: Target) -> HeadFolder | OpenModel:
    """The head or small model in a folder, with the target's tokens; reads no weights.

    Raises ModelError and its kind where it cannot be used, or cannot be measured along known texts.
    """
    if is_head(folder):
        head = open_head(folder, target.model)
        if isinstance(head.config, MedusaConfig):
            raise ModelError(f"{folder} holds Medusa's heads, which cannot be measured; name another draft")
        if isinstance(head.config, EagleConfig) and head.config.fc_reads_token:
            raise ModelError(f"{folder} holds an EAGLE-1 or 2, which cannot be measured; name another draft")
        return head
    files = resolve(str(folder))
    small = open_model(files)
    sizes = small.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1] or not Vocabulary(target.files).same_ids(Vocabulary(files)):
        have = f"{sizes[0]} tokens, and {target.name} {sizes[1]}"
        if sizes[0] == sizes[1]:
            have = f"other tokens than {target.name}, though as many"
        raise ModelError(f"{folder} has {have}; drafts that are measured have their target's vocabulary")
    return small


def read_draft(folder: Path, target: Target, depth: int) -> TrainableDraft:
    """The head or small model in a folder, which reads hidden states as the target leaves them.

    `depth` is how many levels of a small model are measured; a head has its own. Raises as `open_draft`.
    """
    opened = open_draft(folder, target)
    if not isinstance(opened, HeadFolder):
        return read_small(opened, depth)
    head = opened.module(target.model)
    assert isinstance(head, BlockHead | EagleHead)  # as open_draft has seen
    scale_ND = torch.ones(len(head.config.taps), head.config.target_hidden_size)
    return draft_of(head, scale_ND)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two drafts along the same answers, in tokens a second."""

    new: float
    old: float
    gain: float  # the mean of the differences, answer by answer
    error: float  # its standard error
    answers: int

    @classmethod
    def of(cls, new_S: NDArray[np.float64], old_S: NDArray[np.float64]) -> PairedComparison:
        """Compare the speeds at the same answers."""
        gains = new_S - old_S
        count = len(gains)
        error = float(gains.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        return cls(float(new_S.mean()), float(old_S.mean()), float(gains.mean()), error, count)

    @property
    def better(self) -> bool:
        """Whether the new one takes the old one's place."""
        return self.gain > self.error

    def told(self, folder: Path) -> str:
        """Why it did or did not, in a line."""
        done, than = ("is replaced", "more") if self.better else ("stays", "not more")
        return (
            f"{folder} {done}: on {self.answers} held-out answers the new one makes {self.new:.2f} tokens/s "
            f"and the old one {self.old:.2f}; the difference, {self.gain:.2f}, is {than} than its standard "
            f"error, {self.error:.2f}"
        )


class Incumbent:
    """The draft that may be replaced: a head, a small model or a pool of these."""

    def __init__(self, folder: Path, target: Target) -> None:
        """Raises TuneError where there is nothing to be replaced, ModelError and its kind where it cannot be
        used with this target.
        """
        if not folder.is_dir():
            before = folder.with_name(folder.name + BEFORE)
            hint = f"; {before} is there: rename it" if before.is_dir() else "; give --out alone"
            raise TuneError(f"there is no folder {folder} whose draft could be replaced{hint}")
        self.folder = folder
        self.members = [folder]
        self._target = target
        if is_pool(folder):
            pool = read_pool(folder)
            if not is_of(pool.fingerprint, target.model):
                raise ModelError(f"the pool {folder} was tuned for {pool.target}; name that model")
            self.members = member_folders(folder, pool)
        elif not (folder / "config.json").is_file():
            raise TuneError(f"{folder} holds no draft and no pool that could be replaced; give --out alone")
        for member in self.members:
            open_draft(member, target)  # before anything is trained

    def taps(self) -> tuple[int, ...]:
        """The layers whose inputs its heads read."""
        return tuple(sorted({tap for member in self.members for tap in taps_of(member, self._target)}))

    def drafts(self, depth: int) -> list[TrainableDraft]:
        """Its drafts; `depth` as `read_draft`."""
        return [read_draft(member, self._target, depth) for member in self.members]


def taps_of(folder: Path, target: Target) -> tuple[int, ...]:
    """The layers whose inputs a draft reads: none, where it is a model."""
    draft = open_draft(folder, target)
    return draft.config.taps if isinstance(draft, HeadFolder) else ()


def replace_folder(new: Path, old: Path) -> None:
    """Put what `new` holds, but for its work, in the place of `old`, which is kept as OLD.before.

    Whoever reads the folder finds the old draft or the new one whole, or for an instant none. Raises OSError.
    """
    before = old.with_name(old.name + BEFORE)
    fresh = Path(tempfile.mkdtemp(dir=old.parent, prefix=f"{old.name}.", suffix=".partial"))
    try:
        for entry in new.iterdir():
            if entry.name == "work":
                continue
            if entry.is_dir():
                shutil.copytree(entry, fresh / entry.name)
            else:
                shutil.copy2(entry, fresh / entry.name)
        fresh.chmod(old.stat().st_mode & 0o777)
        if before.exists():
            shutil.rmtree(before)
        os.rename(old, before)
        os.rename(fresh, old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
