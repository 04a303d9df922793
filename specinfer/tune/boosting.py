"""Training sets of the later members of a pool, which make each member guess different tokens.

    sequence   the texts that the pool predicts best are left out (the paper's collective boost-tuning)
    discount   tokens that the pool proposes keep a part of their probability in the learned distribution, and
    a
               position counts less the more probability the pool's tokens have there. So a member agrees with
               the pool where the target is certain of the pool's token, and guesses another token elsewhere
    none       no boosting: members that all start from scratch differ by their seeds alone

A member proposes its likeliest token at each position of the answers.

Shapes: R tokens of an answer, K labels, M members, each proposing one token at a position.
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
DROPPED: Final = 0.5  # sequence: fraction of a member's texts that the next member does not learn from
KEPT: Final = 0.3  # discount: fraction of its probability that a proposed token keeps
_MIN_MASS: Final = 1e-4  # probability left over after discounting
_MAX_CANDIDATES: Final = 8192  # number of candidate tokens, for a member that can propose every token
Proposals = Sequence[Tensor]  # one member's tokens, int64 [R] for each text; -1: no proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostConfig:
    """How each member of a pool is boosted.

    The defaults made the best pools of small models (docs/boost-tuning.md). The paper's setting is
    `sequence`, not warm.
    """

    form: Boost = "discount"
    warm: bool = True  # each member starts from the previous member, not as the first one did

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise TuneError(f"boost is {self.form!r}; allowed: {', '.join(FORMS)}")

    def facts(self) -> dict[str, object]:
        """Settings that must not change when a tuning is resumed."""
        facts: dict[str, object] = {"form": self.form, "width": 1, "dropped": DROPPED}
        facts |= {"kept": KEPT} if self.form == "discount" else {}
        return facts | ({"warm": True} if self.warm else {})


def dataset_of(corpus: Corpus, form: Boost, known: Sequence[Proposals]) -> TrainingSet:
    """Return the training set of a member; `known` holds the proposals of the earlier members, in order."""
    if not known or form == "none":
        return TrainingSet(corpus)
    if form == "sequence":
        return TrainingSet(corpus, _left(corpus, known))
    return _Discounted(corpus, known)


def hit_probabilities(text: TunedText, proposed_RM: Tensor) -> Tensor:
    """Probability that the target's token is among the proposed tokens, [R], at the text's own temperature.

    At temperature 0 it is 1 if the likeliest token is proposed, else 0. A proposal of -1 is ignored.
    """
    temperature = temperature_of(text.key, held_out=text.held_out)
    there_RK = _among(text.label_ids_RK, proposed_RM)
    if temperature == 0:
        likeliest = text.label_logprobs_RK.argmax(dim=1, keepdim=True)
        return there_RK.gather(1, likeliest)[:, 0].float()
    if temperature == 1:
        probs_RK = text.label_logprobs_RK.exp()
    else:
        probs_RK = (text.label_logprobs_RK / temperature).softmax(dim=1)
    return (probs_RK * there_RK).sum(dim=1).clamp(max=1.0)


def discounted(text: TunedText, proposed_RM: Tensor, kept: float) -> Tensor:
    """Log-probabilities of the labels after scaling proposed tokens by `kept` and renormalizing, [R, K]."""
    there_RK = _among(text.label_ids_RK, proposed_RM)
    taken_R = (1 - kept) * (text.label_logprobs_RK.exp() * there_RK).sum(dim=1)
    left_R = (1 - taken_R).clamp(min=_MIN_MASS)
    factors_RK = torch.where(there_RK, kept, 1.0)
    return text.label_logprobs_RK + factors_RK.log() - left_R.log()[:, None]


class _Discounted(TrainingSet):
    """All texts, with the probability of proposed tokens and the weight of their positions reduced."""

    def __init__(self, corpus: Corpus, known: Sequence[Proposals]) -> None:
        super().__init__(corpus)
        self._known = known

    def text(self, number: int) -> TunedText:
        """Read a text."""
        text = super().text(number)
        proposed_RM = _proposed(self._known, number)
        counts_R = 1 - (1 - KEPT) * hit_probabilities(text, proposed_RM)
        return replace(text, counts_R=counts_R, label_logprobs_RK=discounted(text, proposed_RM, KEPT))


def _left(corpus: Corpus, known: Sequence[Proposals]) -> list[int]:
    """Numbers of the texts that remain after each member's best predicted texts are dropped."""

    def share(number: int, members: int) -> float:
        """Mean hit probability over a text, in [0, 1]. Its first token is skipped: no draft guesses it."""
        text = corpus.text(number, held_out=False)
        hits_R = hit_probabilities(text, _proposed(known[:members], number))[1:]
        return float(hits_R.mean()) if len(hits_R) else 1.0

    numbers = [*range(corpus.count(held_out=False))]
    for members in range(1, len(known) + 1):
        hits = {number: share(number, members) for number in numbers}
        numbers.sort(key=lambda number: (hits[number], number))
        numbers = numbers[: len(numbers) - int(DROPPED * len(numbers))]
    return sorted(numbers)


def proposals(draft: TrainableDraft, corpus: Corpus, progress: Progress) -> Proposals:
    """A member's proposals for every training text."""
    among_S = None  # candidate entries: for a draft that names every token, the tokens that occur as labels
    if len(draft.ids) == draft.vocab > _MAX_CANDIDATES:  # entries equal token ids
        among_S = torch.tensor(frequent_tokens(corpus, _MAX_CANDIDATES, draft.vocab))
    dataset = TrainingSet(corpus)
    found: list[Tensor] = []
    with progress.showing(len(dataset), "guesses of the pool so far", "texts"):
        for number in range(len(dataset)):
            found.append(proposed(draft, dataset.text(number), among_S))
            progress.advance(1)
    return found


@torch.inference_mode()
def proposed(draft: TrainableDraft, text: TunedText, among_S: Tensor | None = None) -> Tensor:
    """A draft's likeliest token at each position of an answer, int64 [R]; -1: none.

    `among_S` restricts the choice to these entries of `draft.ids`.
    """
    found_R = torch.full((text.answer,), -1)
    if text.answer < 2:
        return found_R
    anchors = anchors_of(text, EVERY_ANCHOR, torch.Generator())
    batch = block_batch([text], [anchors], 1, draft.scale_ND)
    logits = draft.logits(draft.level_states(batch, 1), batch.before_BAL, among_S)[0, :, 0]
    ids = draft.ids if among_S is None else draft.ids[among_S]
    found_R[anchors + 1 - text.prompt] = ids[logits.topk(1, dim=-1).indices[:, 0]]
    return found_R


def _proposed(known: Sequence[Proposals], number: int) -> Tensor:
    return torch.stack([one[number] for one in known], dim=1)


def _among(ids_RK: Tensor, proposed_RM: Tensor) -> Tensor:
    """True where a label is among the proposed tokens, bool [R, K]."""
    return (ids_RK[:, :, None] == proposed_RM[:, None, :]).any(dim=2)
