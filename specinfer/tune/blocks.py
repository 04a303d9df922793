"""Texts -> blocks to learn from: anchors in answers, and what the target thinks behind them.

    text     p p p p a a a a a a a        p: prompt, a: answer
    block            ^ 1 2 3              an anchor and the levels behind it: level l guesses token anchor + l

A block sees hidden states of the tokens before its anchor. Guesses are made behind the true tokens.
Shapes: B texts, T tokens of the longest, A anchors a text, L levels, K labels, N taps, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.tune.shards import TunedText


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of some texts; what is not `valid` is padding."""

    taps_BTND: Tensor  # float32, each value divided by how large its like is
    tokens_BT: Tensor  # of the texts, so many levels further than the taps
    anchors_BA: Tensor  # places in the texts
    before_BAL: Tensor  # the token before each guess: the anchor, then true tokens
    next_BAL: Tensor  # the token that came
    label_ids_BALK: Tensor  # the target's ids
    label_chances_BALK: Tensor
    weights_BAL: Tensor  # how much each guess counts
    valid_BAL: Tensor  # bool

    @property
    def anchor_ids_BA(self) -> Tensor:
        """The tokens that blocks hang from."""
        return self.before_BAL[..., 0]


def anchors_of(text: TunedText, most: int, generator: torch.Generator) -> Tensor:
    """At most so many places of an answer from which blocks can hang, ascending; none of a single token."""
    places = torch.arange(text.prompt, len(text.tokens_T) - 1)
    if len(places) > most:
        places = places[torch.randperm(len(places), generator=generator)[:most]].sort().values
    return places


def blocks(texts: Sequence[TunedText], anchors: Sequence[Tensor], levels: int, scale_ND: Tensor) -> Blocks:
    """Blocks of so many levels at these anchors of the texts, of which each has one or more."""
    width = max(len(places) for places in anchors)
    rows = max(int(places[-1]) for places in anchors)  # a block sees what is before its anchor
    labels = texts[0].label_ids_RK.shape[1]
    taps_BTND = torch.zeros(len(texts), rows, *scale_ND.shape)
    tokens_BT = torch.zeros(len(texts), rows + levels, dtype=torch.int64)
    anchors_BA = torch.ones(len(texts), width, dtype=torch.int64)
    shape = (len(texts), width, levels)
    before, following = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    label_ids = torch.zeros((*shape, labels), dtype=torch.int64)
    label_chances = torch.zeros((*shape, labels))
    weights = torch.zeros(shape)
    valid = torch.zeros(shape, dtype=torch.bool)
    for i, (text, places) in enumerate(zip(texts, anchors, strict=True)):
        seen, count, end = int(places[-1]), len(places), len(text.tokens_T)
        taps_BTND[i, :seen] = text.taps_TND[:seen].float() * scale_ND
        known = text.tokens_T[: rows + levels]
        tokens_BT[i, : len(known)] = known
        anchors_BA[i, :count] = places
        guessed_AL = places[:, None] + 1 + torch.arange(levels)
        there_AL = guessed_AL.clamp(max=end - 1)
        valid[i, :count] = guessed_AL < end
        before[i, :count] = text.tokens_T[there_AL - 1]
        following[i, :count] = text.tokens_T[there_AL]
        label_ids[i, :count] = text.label_ids_RK[there_AL - text.prompt]
        label_chances[i, :count] = text.label_logprobs_RK[there_AL - text.prompt].exp()
        weights[i, :count] = text.weights_R[there_AL - text.prompt]
    return Blocks(
        taps_BTND, tokens_BT, anchors_BA, before, following, label_ids, label_chances, weights, valid
    )
