"""The loss between a draft's distribution and the target's, position by position.

The target's distribution p is known for its K likeliest tokens; the rest is one lumped mass. The draft's
distribution q is over its vocabulary, and a shortlist of it is computed: the tokens with most
label mass in the batch, and a sample of all others. The sampled logits are raised to compensate, so that the
sum over all tokens is right in expectation.

    w kl + (1 - w) tv      w = e^(-3 sum min(p, q)): kl = sum p log(p / q) where p and q differ much, else
                           total variation, tv = 1 - sum min(p, q)

Losses are sums, so the parts of a step add up. All parts share one shortlist, so that the gradient does not
depend on the number of parts.

Shapes: R positions, K labels, S shortlisted tokens, U tokens of the draft, V of the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from specinfer.kernels.machine import is_quick_in_bfloat16
from specinfer.tune.dataset import BlockBatch
from specinfer.tune.draft import TrainableDraft

_DRAWN: Final = 0.25  # fraction of a shortlist that is sampled from the remaining tokens


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """A subset of a head's vocabulary, weighted to represent all of them."""

    entries_S: Tensor  # indices into the U, int64, distinct
    raised_S: Tensor  # added to their logits
    places_RK: Tensor  # indices of the labels in the shortlist; 0 if absent
    probs_RK: Tensor  # p of the labels; 0 if absent

    def parts(self, counts: list[int]) -> list[Self]:
        """Split by positions into consecutive parts of these counts."""
        of_parts = zip(torch.split(self.places_RK, counts), torch.split(self.probs_RK, counts), strict=True)
        return [replace(self, places_RK=places, probs_RK=probs) for places, probs in of_parts]


def shortlist(
    entries_RK: Tensor, probs_RK: Tensor, num_tokens: int, size: int, generator: torch.Generator
) -> Shortlist:
    """A shortlist of `size` of the `num_tokens` tokens, for labels with these probabilities.

    `entries_RK` are indices of the labels in the draft's vocabulary, -1 for others.
    """
    known = entries_RK >= 0
    probs_RK = probs_RK * known
    clamped = entries_RK.clamp(min=0)
    if size >= num_tokens:
        everything = torch.arange(num_tokens, device=entries_RK.device)
        return Shortlist(everything, torch.zeros(num_tokens, device=entries_RK.device), clamped, probs_RK)
    masses_U = torch.zeros(num_tokens, device=entries_RK.device).index_add_(
        0, clamped.flatten(), probs_RK.flatten()
    )
    drawn = max(1, int(_DRAWN * size))
    order_U = masses_U.argsort(descending=True)
    rest = order_U[size - drawn :]
    chosen = rest[torch.randperm(len(rest), generator=generator)[:drawn].to(rest.device)]
    entries_S = torch.cat((order_U[: size - drawn], chosen))
    raised_S = torch.zeros(size, device=entries_RK.device)
    raised_S[size - drawn :] = math.log(len(rest) / drawn)
    place_U = torch.full((num_tokens,), -1, dtype=torch.int64, device=entries_RK.device)
    place_U[entries_S] = torch.arange(size, device=entries_RK.device)
    places_RK = place_U[clamped]
    # A sampled label stands for many other tokens, so only labels that were not sampled are learned from.
    unsampled = (places_RK >= 0) & (places_RK < size - drawn)
    return Shortlist(entries_S, raised_S, places_RK.clamp(min=0), probs_RK * unsampled)


def losses(logits_RS: Tensor, short: Shortlist) -> Tensor:
    """The loss of each position, [R], from the head's logits for a shortlist, before `raised_S` is added.

    A position without a label in the vocabulary has a constant loss, hence no gradient.
    """
    log_q_RS = (logits_RS + short.raised_S).log_softmax(dim=-1)
    log_q_RK = log_q_RS.gather(1, short.places_RK)
    p_RK = short.probs_RK
    log_p_RK = p_RK.clamp(min=1e-9).log()
    kl_R = (p_RK * (log_p_RK - log_q_RK)).sum(dim=1)
    overlap_R = torch.minimum(p_RK, log_q_RK.exp()).sum(dim=1)
    w_R = torch.exp(-3 * overlap_R.detach())
    return w_R * kl_R + (1 - w_R) * (1 - overlap_R)


@dataclass(frozen=True, slots=True, eq=False)
class GuessBatch:
    """The guesses of some blocks, concatenated, with their labels."""

    batch: BlockBatch
    before_R: Tensor  # the tokens before the guesses
    entries_RK: Tensor  # label indices in the draft's vocabulary; -1: others
    probs_RK: Tensor  # p of the labels
    weights_R: Tensor  # loss weight

    @classmethod
    def of(cls, batch: BlockBatch, entry_V: Tensor) -> Self:
        """Flatten a batch; `entry_V` maps tokens to entries of the vocabulary."""
        valid = batch.valid_BAL
        return cls(
            batch,
            batch.before_BAL[valid],
            entry_V[batch.label_ids_BALK[valid]],
            batch.label_probs_BALK[valid],
            batch.weights_BAL[valid],
        )


def shortlists(
    draft: TrainableDraft, parts: Sequence[GuessBatch], size: int, generator: torch.Generator
) -> list[Shortlist]:
    """One shortlist for all parts of a step, split by part."""
    entries, probs = zip(*((part.entries_RK, part.probs_RK) for part in parts), strict=True)
    short = shortlist(torch.cat(entries), torch.cat(probs), len(draft.ids), size, generator)
    return short.parts([len(of_part) for of_part in entries])


def summed_losses(draft: TrainableDraft, places: GuessBatch, short: Shortlist) -> Tensor:
    """Weighted sum of the losses of the guesses."""
    valid = places.batch.valid_BAL
    with torch.autocast("cpu", torch.bfloat16, enabled=is_quick_in_bfloat16()):
        h_RD = draft.level_states(places.batch, valid.shape[2])[valid]
        logits = draft.logits(h_RD, places.before_R, short.entries_S)
    return (losses(logits.float(), short) * places.weights_R).sum()
