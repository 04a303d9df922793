"""Training sets of the later members of a pool, which make each member guess different tokens.

Tokens that the members so far propose keep a part of their probability in the learned distribution, and a
position counts less the more probability these tokens have there. So a member agrees with the pool where the
target is certain of the pool's token, and guesses another token elsewhere.

A member proposes its likeliest token at each position of the answers.

Shapes: R tokens of an answer, K labels, M members, each proposing one token at a position.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from specinfer.progress import Progress
from specinfer.tune.dataset import Corpus, TrainingSet, TunedText, anchors_of, block_batch
from specinfer.tune.draft import EVERY_ANCHOR, TrainableDraft
from specinfer.tune.initial_head import frequent_tokens
from specinfer.tune.prompts import temperature_of

KEPT: Final = 0.3  # fraction of its probability that a proposed token keeps
_MIN_MASS: Final = 1e-4  # probability left over after discounting
_MAX_CANDIDATES: Final = 8192  # number of candidate tokens, for a member that can propose every token
Proposals = Sequence[Tensor]  # one member's tokens, int64 [R] for each text; -1: no proposal


class DiscountedSet(TrainingSet):
    """All texts, with the probability of proposed tokens and the weight of their positions reduced."""

    def __init__(self, corpus: Corpus, known: Sequence[Proposals]) -> None:
        """`known` holds the proposals of the earlier members; without any, texts are as collected."""
        super().__init__(corpus)
        self._known = known

    def text(self, number: int) -> TunedText:
        """Read a text."""
        text = super().text(number)
        if not self._known:
            return text
        proposed_RM = torch.stack([one[number] for one in self._known], dim=1)
        counts_R = 1 - (1 - KEPT) * hit_probabilities(text, proposed_RM)
        return replace(text, counts_R=counts_R, label_logprobs_RK=discounted(text, proposed_RM))


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


def discounted(text: TunedText, proposed_RM: Tensor) -> Tensor:
    """Log-probabilities of the labels after scaling proposed tokens by KEPT and renormalizing, [R, K]."""
    there_RK = _among(text.label_ids_RK, proposed_RM)
    taken_R = (1 - KEPT) * (text.label_logprobs_RK.exp() * there_RK).sum(dim=1)
    left_R = (1 - taken_R).clamp(min=_MIN_MASS)
    factors_RK = torch.where(there_RK, KEPT, 1.0)
    return text.label_logprobs_RK + factors_RK.log() - left_R.log()[:, None]


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
    anchors = anchors_of(text, EVERY_ANCHOR, torch.Generator())
    batch = block_batch([text], [anchors], 1, draft.scale_ND)
    logits = draft.logits(draft.level_states(batch, 1), batch.before_BAL, among_S)[0, :, 0]
    ids = draft.ids if among_S is None else draft.ids[among_S]
    found_R[anchors + 1 - text.prompt] = ids[logits.topk(1, dim=-1).indices[:, 0]]
    return found_R


def _among(ids_RK: Tensor, proposed_RM: Tensor) -> Tensor:
    """True where a label is among the proposed tokens, bool [R, K]."""
    return (ids_RK[:, :, None] == proposed_RM[:, None, :]).any(dim=2)
