"""Losses: how far what a draft guesses is from the target's law, place by place.

The target's law p is known by its K likeliest tokens; the rest of it is one mass. The draft's law q is over
the tokens it can name, of which a shortlist is computed: those that matter to this batch, and a few of all
others, whose logits are raised by as much as they stand for, so that the sum over all is right on average.

    kl       sum p log(p / q)       all of the target's choices matter, in proportion
    hybrid   w kl + (1 - w) tv      kl where they are far apart: w = e^(-3 sum min(p, q)); then the total
                                    variation, tv = 1 - sum min(p, q)

Losses are sums, so those of a step's parts are added up; and all parts have one shortlist, so that the
gradient does not depend on how many parts there are.

Shapes: R places, K labels, S shortlisted tokens, U tokens the draft can name, V tokens of the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from specinfer.kernels.machine import is_quick_in_bfloat16
from specinfer.tune.dataset import BlockBatch
from specinfer.tune.draft import TrainableDraft

Loss = Literal["hybrid", "kl"]
LOSSES: Final[tuple[Loss, ...]] = get_args(Loss)
_DRAWN: Final = 0.25  # of a shortlist: drawn from all that is not in it by right


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """Some of the tokens a head can name, standing for all."""

    entries_S: Tensor  # among the U, int64, each once
    raised_S: Tensor  # what is added to their logits
    places_RK: Tensor  # where the labels are in it; 0 where they are not
    chances_RK: Tensor  # p of the labels; 0 where they are not in it

    def parts(self, counts: list[int]) -> list[Shortlist]:
        """The same for so many places each, one behind the other."""
        of_parts = zip(torch.split(self.places_RK, counts), torch.split(self.chances_RK, counts), strict=True)
        return [replace(self, places_RK=places, chances_RK=chances) for places, chances in of_parts]


def shortlist(
    entries_RK: Tensor, chances_RK: Tensor, named: int, size: int, generator: torch.Generator
) -> Shortlist:
    """A shortlist of `size` of the `named` tokens, for labels with these chances.

    `entries_RK` are the labels among the tokens that can be named, -1 for others.
    """
    known = entries_RK >= 0
    chances_RK = chances_RK * known
    clamped = entries_RK.clamp(min=0)
    if size >= named:
        everything = torch.arange(named, device=entries_RK.device)
        return Shortlist(everything, torch.zeros(named, device=entries_RK.device), clamped, chances_RK)
    masses_U = torch.zeros(named, device=entries_RK.device).index_add_(
        0, clamped.flatten(), chances_RK.flatten()
    )
    drawn = max(1, int(_DRAWN * size))
    order_U = masses_U.argsort(descending=True)
    rest = order_U[size - drawn :]
    chosen = rest[torch.randperm(len(rest), generator=generator)[:drawn].to(rest.device)]
    entries_S = torch.cat((order_U[: size - drawn], chosen))
    raised_S = torch.zeros(size, device=entries_RK.device)
    raised_S[size - drawn :] = math.log(len(rest) / drawn)
    place_U = torch.full((named,), -1, dtype=torch.int64, device=entries_RK.device)
    place_U[entries_S] = torch.arange(size, device=entries_RK.device)
    places_RK = place_U[clamped]
    # A label that was drawn for many others says nothing of them: only those in it by right are learnt from.
    right = (places_RK >= 0) & (places_RK < size - drawn)
    return Shortlist(entries_S, raised_S, places_RK.clamp(min=0), chances_RK * right)


def losses(kind: Loss, logits_RS: Tensor, short: Shortlist) -> Tensor:
    """The loss of each place, [R], of the head's logits for a shortlist, `raised_S` not yet added.

    Where none of the labels can be named there is nothing to learn: those places' are constant.
    """
    log_q_RS = (logits_RS + short.raised_S).log_softmax(dim=-1)
    log_q_RK = log_q_RS.gather(1, short.places_RK)
    p_RK = short.chances_RK
    log_p_RK = p_RK.clamp(min=1e-9).log()
    kl_R = (p_RK * (log_p_RK - log_q_RK)).sum(dim=1)
    if kind == "kl":
        return kl_R
    alike_R = torch.minimum(p_RK, log_q_RK.exp()).sum(dim=1)
    w_R = torch.exp(-3 * alike_R.detach())
    return w_R * kl_R + (1 - w_R) * (1 - alike_R)


@dataclass(frozen=True, slots=True, eq=False)
class GuessBatch:
    """The guesses of some blocks, one behind the other, with the labels they are held against."""

    batch: BlockBatch
    before_R: Tensor  # the tokens before the guesses
    entries_RK: Tensor  # the labels among the tokens the draft can name; -1: others
    chances_RK: Tensor  # of the labels
    weights_R: Tensor  # how much each counts

    @staticmethod
    def of(batch: BlockBatch, entry_V: Tensor) -> GuessBatch:
        """Those of a batch; `entry_V` is where tokens are among those the draft can name."""
        valid = batch.valid_BAL
        return GuessBatch(
            batch,
            batch.before_BAL[valid],
            entry_V[batch.label_ids_BALK[valid]],
            batch.label_chances_BALK[valid],
            batch.weights_BAL[valid],
        )


def shortlists(
    draft: TrainableDraft, parts: Sequence[GuessBatch], size: int, generator: torch.Generator
) -> list[Shortlist]:
    """One shortlist for all parts of a step, for the places of each."""
    entries, chances = zip(*((part.entries_RK, part.chances_RK) for part in parts), strict=True)
    short = shortlist(torch.cat(entries), torch.cat(chances), len(draft.ids), size, generator)
    return short.parts([len(of_part) for of_part in entries])


def summed_losses(draft: TrainableDraft, places: GuessBatch, short: Shortlist, kind: Loss) -> Tensor:
    """The sum of the losses of guesses, each as much as it counts."""
    valid = places.batch.valid_BAL
    with torch.autocast("cpu", torch.bfloat16, enabled=is_quick_in_bfloat16()):
        h_RD = draft.guessed(places.batch, valid.shape[2])[valid]
        logits = draft.logits(h_RD, places.before_R, short.entries_S)
    return (losses(kind, logits.float(), short) * places.weights_R).sum()
