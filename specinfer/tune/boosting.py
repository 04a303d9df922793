"""Boosting: what the next member of a pool learns, so that it guesses what the others do not.

    sequence   texts that the pool predicts best are left out (the paper's collective boost-tuning)
    discount   tokens that the pool proposes keep a part of their probability in the law that is learnt, and
               places count the less the likelier they hold the target's token. So a member says what the pool
               says where the target is sure of it, and something else where it is not
    none       nothing: members that do not begin as the one before them differ by their seeds alone

A member proposes its likeliest token at every place of the answers.

Shapes: R tokens of an answer, K labels, M members, each of which proposes a token at a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.progress import Progress
from specinfer.tune.dataset import Corpus, TrainingSet, TunedText, anchors_of, block_batch
from specinfer.tune.draft import EVERY_ANCHOR, TrainableDraft
from specinfer.tune.initial_head import frequent_tokens
from specinfer.tune.prompts import temperature_of

Boost = Literal["discount", "sequence", "none"]
FORMS: Final[tuple[Boost, ...]] = get_args(Boost)
DROPPED: Final = 0.5  # sequence: the part of a member's texts that the next one does not learn from
KEPT: Final = 0.3  # discount: the part of their probability that tokens keep which the pool proposes
_LEAST: Final = 1e-4  # of a law that is left
_LOOKED_AT: Final = 8192  # tokens among which a member that can name all proposes
Proposals = Sequence[Tensor]  # a member's tokens, int64 [R] of each text to learn from; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostConfig:
    """How members of a pool learn from each other.

    As it stands it is what made the best pools of small models (docs/boost-tuning.md); the paper's is
    `sequence`, not warm.
    """

    form: Boost = "discount"
    warm: bool = True  # members begin as the one before them, and not as the first one did

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise TuneError(f"boost is {self.form!r}; allowed: {', '.join(FORMS)}")

    def facts(self) -> dict[str, object]:
        """What a tuning that is gone on with must have in common with this one."""
        facts: dict[str, object] = {"form": self.form, "width": 1, "dropped": DROPPED}
        facts |= {"kept": KEPT} if self.form == "discount" else {}
        return facts | ({"warm": True} if self.warm else {})


def dataset_of(corpus: Corpus, form: Boost, known: Sequence[Proposals]) -> TrainingSet:
    """What a member learns from, where `known` is what the members before it propose, in their order."""
    if not known or form == "none":
        return TrainingSet(corpus)
    if form == "sequence":
        return TrainingSet(corpus, _left(corpus, known))
    return _Discounted(corpus, known)


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


class _Discounted(TrainingSet):
    """All texts; proposed tokens keep a part of their probability, and of their places' weight as much."""

    def __init__(self, corpus: Corpus, known: Sequence[Proposals]) -> None:
        super().__init__(corpus)
        self._known = known

    def text(self, number: int) -> TunedText:
        """Read one of them."""
        text = super().text(number)
        proposed_RM = _proposed(self._known, number)
        counts_R = 1 - (1 - KEPT) * hit_chances(text, proposed_RM)
        return replace(text, counts_R=counts_R, label_logprobs_RK=discounted(text, proposed_RM, KEPT))


def _left(corpus: Corpus, known: Sequence[Proposals]) -> list[int]:
    """The texts that are left when, member by member, those that the pool predicts best are dropped."""

    def share(number: int, members: int) -> float:
        """How much of a text they predict, of 1: its first token, which nobody guesses, is left out."""
        text = corpus.text(number, held_out=False)
        hits_R = hit_chances(text, _proposed(known[:members], number))[1:]
        return float(hits_R.mean()) if len(hits_R) else 1.0

    numbers = [*range(corpus.count(held_out=False))]
    for members in range(1, len(known) + 1):
        hits = {number: share(number, members) for number in numbers}
        numbers.sort(key=lambda number: (hits[number], number))
        numbers = numbers[: len(numbers) - int(DROPPED * len(numbers))]
    return sorted(numbers)


def proposals(draft: TrainableDraft, corpus: Corpus, progress: Progress) -> Proposals:
    """What a member proposes along all that is learnt from."""
    among_S = None  # of a draft that names every token those are looked at that are ever right
    if len(draft.ids) == draft.vocab > _LOOKED_AT:  # so entries are tokens
        among_S = torch.tensor(frequent_tokens(corpus, _LOOKED_AT, draft.vocab))
    dataset = TrainingSet(corpus)
    found: list[Tensor] = []
    with progress.showing(len(dataset), "guesses of the pool so far", "texts"):
        for number in range(len(dataset)):
            found.append(proposed(draft, dataset.text(number), among_S))
            progress.advance(1)
    return found


@torch.inference_mode()
def proposed(draft: TrainableDraft, text: TunedText, among_S: Tensor | None = None) -> Tensor:
    """A draft's likeliest token behind each place of an answer, int64 [R]; -1: none.

    Of these entries of its ids, where they are given.
    """
    found_R = torch.full((text.answer,), -1)
    if text.answer < 2:
        return found_R
    anchors = anchors_of(text, EVERY_ANCHOR, torch.Generator())
    batch = block_batch([text], [anchors], 1, draft.scale_ND)
    logits = draft.logits(draft.guessed(batch, 1), batch.before_BAL, among_S)[0, :, 0]
    ids = draft.ids if among_S is None else draft.ids[among_S]
    found_R[anchors + 1 - text.prompt] = ids[logits.topk(1, dim=-1).indices[:, 0]]
    return found_R


def _proposed(known: Sequence[Proposals], number: int) -> Tensor:
    return torch.stack([one[number] for one in known], dim=1)


def _among(ids_RK: Tensor, proposed_RM: Tensor) -> Tensor:
    """Which labels are proposed, bool [R, K]."""
    return (ids_RK[:, :, None] == proposed_RM[:, None, :]).any(dim=2)
