"""Boosting: what the next member of a pool learns, so that it guesses what the others do not.

    sequence   texts that the pool predicts best are left out (the paper's collective boost-tuning)
    discount   tokens that the pool proposes keep a part of their probability in the law that is learnt, and
               places count the less the likelier they hold the target's token. So a member says what the pool
               says where the target is sure of it, and something else where it is not
    none       nothing: members that do not begin as the one before them differ by their seeds alone

What a member proposes at every place of the answers is kept on disk, a file for each shard. It names the
member by a hash of its weights, and is made anew where that is another:

    tokens    int32 [R, W]   of all answers but the held-out ones: the likeliest tokens; -1: none
    member    uint8 [32]

Shapes: R tokens of an answer, K labels, W tokens a member proposes at a place, M tokens all members propose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from specinfer.errors import ModelFileError, TuneError
from specinfer.models.safetensors import TensorEntry, read_entries, write_safetensors
from specinfer.progress import Progress
from specinfer.tune.dataset import (
    Corpus,
    Shard,
    TrainingSet,
    TunedText,
    WholeDataset,
    anchors_of,
    block_batch,
)
from specinfer.tune.draft import TrainableDraft
from specinfer.tune.prompts import temperature_of

_DTYPES: Final = {"I32": torch.int32, "U8": torch.uint8}
_ALL: Final = torch.iinfo(torch.int64).max
Boost = Literal["discount", "sequence", "none"]
FORMS: Final[tuple[Boost, ...]] = get_args(Boost)
_LEAST: Final = 1e-4  # of a law that is left


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostConfig:
    """How members of a pool learn from each other.

    As it stands it is what made the best pools of small models (docs/boost-tuning.md); the paper's is
    `sequence`, not warm.
    """

    form: Boost = "discount"
    width: int = 1  # tokens that each member proposes at a place
    dropped: float = 0.5  # sequence: the part of a member's texts that the next one does not learn from
    warm: bool = True  # members begin as the one before them, and not as the first one did
    kept: float = 0.3  # discount: the part of their probability that tokens keep which the pool proposes

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise TuneError(f"boost is {self.form!r}; allowed: {', '.join(FORMS)}")
        if not 1 <= self.width <= 64:
            raise TuneError(f"width is {self.width}; allowed: 1 to 64 tokens that a member proposes")
        if not 0 <= self.dropped < 1:
            raise TuneError(f"dropped is {self.dropped}; allowed: 0 or more, and less than 1")
        if not 0 < self.kept < 1:
            raise TuneError(f"kept is {self.kept}; allowed: more than 0, and less than 1")

    def facts(self) -> dict[str, object]:
        """What a tuning that is gone on with must have in common with this one."""
        facts: dict[str, object] = {"form": self.form, "width": self.width, "dropped": self.dropped}
        facts |= {"kept": self.kept} if self.form == "discount" else {}
        return facts | ({"warm": True} if self.warm else {})


def dataset_of(corpus: Corpus, config: BoostConfig, known: Sequence[KnownGuesses]) -> TrainingSet:
    """What a member learns from, where `known` is what the members before it propose, in their order."""
    if not known or config.form == "none":
        return WholeDataset(corpus)
    if config.form == "sequence":
        return _Left(corpus, config.dropped, known)
    return _Discounted(corpus, config.kept, known)


def hit_chances(text: TunedText, proposed_RM: Tensor) -> Tensor:
    """How likely the target's token is among those proposed, [R], at the text's own temperature.

    At temperature 0 it is 0 or 1: whether the likeliest is. Proposals of -1 are none.
    """
    temperature = temperature_of(text.key, held_out=text.held_out)
    there_RK = _among(text.label_ids_RK, proposed_RM)
    if temperature == 0:
        likeliest = text.label_logprobs_RK.argmax(dim=1, keepdim=True)
        return there_RK.gather(1, likeliest)[:, 0].float()
    if temperature == 1:
        chances_RK = text.label_logprobs_RK.exp()
    else:
        chances_RK = (text.label_logprobs_RK / temperature).softmax(dim=1)
    return (chances_RK * there_RK).sum(dim=1).clamp(max=1.0)


def discounted(text: TunedText, proposed_RM: Tensor, kept: float) -> Tensor:
    """The labels' log-probabilities, where proposed tokens keep a part of theirs, renormalised, [R, K]."""
    there_RK = _among(text.label_ids_RK, proposed_RM)
    taken_R = (1 - kept) * (text.label_logprobs_RK.exp() * there_RK).sum(dim=1)
    left_R = (1 - taken_R).clamp(min=_LEAST)
    factors_RK = torch.where(there_RK, kept, 1.0)
    return text.label_logprobs_RK + factors_RK.log() - left_R.log()[:, None]


class _Discounted:
    """All texts; proposed tokens keep a part of their probability, and of their places' weight as much."""

    def __init__(self, corpus: Corpus, kept: float, known: Sequence[KnownGuesses]) -> None:
        self.corpus = corpus
        self._kept = kept
        self._known = known

    def __len__(self) -> int:
        return self.corpus.count(held_out=False)

    def text(self, number: int) -> TunedText:
        """Read one of them."""
        text = self.corpus.text(number, held_out=False)
        proposed_RM = _proposed(self._known, number)
        counts_R = 1 - (1 - self._kept) * hit_chances(text, proposed_RM)
        logprobs_RK = discounted(text, proposed_RM, self._kept)
        return replace(text, counts_R=counts_R, label_logprobs_RK=logprobs_RK)


class _Left:
    """The texts that are left when, member by member, those that the pool predicts best are dropped."""

    def __init__(self, corpus: Corpus, dropped: float, known: Sequence[KnownGuesses]) -> None:
        self.corpus = corpus
        numbers = [*range(corpus.count(held_out=False))]
        for members in range(1, len(known) + 1):
            hits = {number: self._share(number, known[:members]) for number in numbers}
            numbers.sort(key=lambda number: (hits[number], number))
            numbers = numbers[: len(numbers) - int(dropped * len(numbers))]
        self._numbers = sorted(numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def text(self, number: int) -> TunedText:
        """Read one of them."""
        return self.corpus.text(self._numbers[number], held_out=False)

    def _share(self, number: int, known: Sequence[KnownGuesses]) -> float:
        """How much of a text the pool predicts, of 1: its first token, which nobody guesses, is left out."""
        text = self.corpus.text(number, held_out=False)
        hits_R = hit_chances(text, _proposed(known, number))[1:]
        return float(hits_R.mean()) if len(hits_R) else 1.0


class KnownGuesses:
    """One member's, by the number of the text among those that are learnt from."""

    def __init__(self, corpus: Corpus, folder: Path, weights: Path) -> None:
        """`folder` is where they are kept, `weights` the member's model.safetensors; raises OSError."""
        self._corpus = corpus
        self._folder = folder
        with weights.open("rb") as file:
            self._member = hashlib.file_digest(file, "sha256").digest()
        self._rows: list[tuple[TensorEntry, int, int]] = []  # where each text's are

    def complete(
        self, draft: TrainableDraft, width: int, progress: Progress, among_S: Tensor | None = None
    ) -> None:
        """Compute what is not there; `draft` is the member, which proposes so many tokens at a place.

        `among_S` are the entries of the draft's ids that are looked at, as others are hardly ever right;
        None: all. Raises OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        shards = self._corpus.shards()
        progress.start(len(shards), "guesses of the pool so far", "shards")
        try:
            for shard in shards:
                texts = [number for number, held_out in enumerate(shard.held_out) if not held_out]
                entry = self._read(shard, texts, width)
                if entry is None and texts:
                    first = len(self._rows)  # texts are numbered as they lie in the shards
                    ours = [self._corpus.text(first + place, held_out=False) for place in range(len(texts))]
                    self._write(shard, [proposed(draft, text, width, among_S) for text in ours])
                    entry = self._read(shard, texts, width)
                start = 0
                for number in texts:
                    assert entry is not None
                    self._rows.append((entry, start, start + shard.answer(number)))
                    start += shard.answer(number)
                progress.advance(1)
        finally:
            progress.finish()

    def of(self, number: int) -> Tensor:
        """What is proposed behind a text's tokens, int64 [R, W]."""
        entry, start, stop = self._rows[number]
        return entry.read_rows(start, stop).long()

    def _path(self, shard: Shard) -> Path:
        return self._folder / shard.path.name

    def _read(self, shard: Shard, texts: Sequence[int], width: int) -> TensorEntry | None:
        """The tokens of a shard's texts; None where they are another member's, damaged, or not there."""
        try:
            entries = read_entries([self._path(shard)], _DTYPES)
            whole = entries["member"].read_rows(0, entries["member"].shape[0])
        except (OSError, ModelFileError, KeyError):
            return None
        rows = sum(shard.answer(number) for number in texts)
        tokens = entries.get("tokens")
        alike = bytes(whole.tolist()) == self._member
        return tokens if alike and tokens is not None and tokens.shape == (rows, width) else None

    def _write(self, shard: Shard, parts: Sequence[Tensor]) -> None:
        tensors = {
            "tokens": torch.cat(list(parts)).to(torch.int32).contiguous(),
            "member": torch.tensor([*self._member], dtype=torch.uint8),
        }
        write_safetensors(self._path(shard), tensors, mode=0o600)


@torch.inference_mode()
def proposed(draft: TrainableDraft, text: TunedText, width: int, among_S: Tensor | None = None) -> Tensor:
    """The `width` likeliest tokens by a draft behind each place of an answer, int64 [R, W]; -1: none.

    Of these entries of its ids, where they are given.
    """
    found = torch.full((text.answer, width), -1, dtype=torch.int64)
    if text.answer < 2:
        return found
    anchors = anchors_of(text, _ALL, torch.Generator())
    batch = block_batch([text], [anchors], 1, draft.scale_ND)
    logits = draft.logits(draft.guessed(batch, 1), batch.before_BAL, among_S)[0, :, 0]
    ids = draft.ids if among_S is None else draft.ids[among_S]
    count = min(width, logits.shape[-1])
    found[anchors + 1 - text.prompt, :count] = ids[logits.topk(count, dim=-1).indices]
    return found


def _proposed(known: Sequence[KnownGuesses], number: int) -> Tensor:
    return torch.cat([one.of(number) for one in known], dim=1)


def _among(ids_RK: Tensor, proposed_RM: Tensor) -> Tensor:
    """Which labels are proposed, bool [R, K]."""
    return (ids_RK[:, :, None] == proposed_RM[:, None, :]).any(dim=2)
