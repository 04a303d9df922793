"""Places: where a step guesses something, and what it loses there.

Losses are sums, so those of a step's parts are added up; and all parts have one shortlist, so that what is
learnt does not depend on how many there are. Shapes: R places, K labels, V tokens of the target, D the
draft's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.kernels.machine import is_quick_in_bfloat16
from specinfer.tune.blocks import Blocks
from specinfer.tune.draft import Draft
from specinfer.tune.losses import Loss, Shortlist, losses, shortlist


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places of some blocks at which something is guessed, one behind the other."""

    batch: Blocks
    before_R: Tensor  # the tokens before the guesses
    entries_RK: Tensor  # the labels among the tokens the draft can name; -1: others
    chances_RK: Tensor  # of the labels
    weights_R: Tensor  # how much each counts

    @staticmethod
    def of(batch: Blocks, entry_V: Tensor) -> Places:
        """Those of a batch; `entry_V` is where tokens are among those the draft can name."""
        valid = batch.valid_BAL
        return Places(
            batch,
            batch.before_BAL[valid],
            entry_V[batch.label_ids_BALK[valid]],
            batch.label_chances_BALK[valid],
            batch.weights_BAL[valid],
        )


def shortlists(
    draft: Draft, parts: Sequence[Places], size: int, generator: torch.Generator
) -> list[Shortlist]:
    """One shortlist for all parts of a step, for the places of each."""
    entries, chances = zip(*((part.entries_RK, part.chances_RK) for part in parts), strict=True)
    short = shortlist(torch.cat(entries), torch.cat(chances), len(draft.ids), size, generator)
    return short.parts([len(of_part) for of_part in entries])


def summed_losses(draft: Draft, places: Places, short: Shortlist, kind: Loss) -> Tensor:
    """The sum of the losses of guesses, each as much as it counts."""
    valid = places.batch.valid_BAL
    with torch.autocast("cpu", torch.bfloat16, enabled=is_quick_in_bfloat16()):
        h_RD = draft.guessed(places.batch, valid.shape[2])[valid]
        logits = draft.logits(h_RD, places.before_R, short.entries_S)
    return (losses(kind, logits.float(), short) * places.weights_R).sum()
