"""Boosting: what the next member of a pool learns, so that it guesses what the others do not.

    sequence   texts that the pool predicts best are left out (the paper's collective boost-tuning)
    discount   tokens that the pool proposes keep a part of their probability in the law that is learnt, and
               places count the less the likelier they hold the target's token. So a member says what the pool
               says where the target is sure of it, and something else where it is not
    none       nothing: members that do not begin as the one before them differ by their seeds alone

Shapes: R tokens of an answer, K labels, M tokens proposed at a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.tune.known_guesses import KnownGuesses
from specinfer.tune.lessons import AllLessons, Lessons
from specinfer.tune.prompts import temperature_of
from specinfer.tune.shards import Corpus, TunedText

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


def lessons_of(corpus: Corpus, config: BoostConfig, known: Sequence[KnownGuesses]) -> Lessons:
    """What a member learns from, where `known` is what the members before it propose, in their order."""
    if not known or config.form == "none":
        return AllLessons(corpus)
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


def _proposed(known: Sequence[KnownGuesses], number: int) -> Tensor:
    return torch.cat([one.of(number) for one in known], dim=1)


def _among(ids_RK: Tensor, proposed_RM: Tensor) -> Tensor:
    """Which labels are proposed, bool [R, K]."""
    return (ids_RK[:, :, None] == proposed_RM[:, None, :]).any(dim=2)
