"""What heads of all kinds guess along known texts: all that training and measuring ask of a head.

Guesses are made behind the true tokens, at anchors of the texts (blocks.py). A block head computes the rows
of its blocks. An EAGLE head computes every row of the text, and each of its steps with what the step before
put out, as it does when it guesses: a chain of its own hidden states, over tokens that came.

Shapes: B texts, A anchors a text, L levels, D the head's hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specinfer.heads.block import BlockHead, MarkovHead
from specinfer.heads.eagle import EagleHead
from specinfer.tune.blocks import Blocks

Head = BlockHead | EagleHead


def guessed(head: Head, batch: Blocks, levels: int) -> Tensor:
    """What the output layer reads of so many levels behind every anchor, [B, A, L, D]."""
    if isinstance(head, BlockHead):
        read: Tensor = head(batch.taps_BTND, batch.anchor_ids_BA, batch.anchors_BA, levels)
        return read
    rows = batch.taps_BTND.shape[1]
    # Row t is of token t + 1, and its step s of the token s behind that.
    ids_BTS = batch.tokens_BT[:, 1:].unfold(1, levels, 1)[:, :rows]
    read_BTSD: Tensor = head(ids_BTS, batch.taps_BTND)
    at_BA11 = (batch.anchors_BA - 1)[..., None, None]
    return read_BTSD.gather(1, at_BA11.expand(-1, -1, *read_BTSD.shape[2:]))


def markov_term(head: Head) -> MarkovHead | None:
    """What makes a guess depend on the token before it besides, where the head has that."""
    return head.markov_head if isinstance(head, BlockHead) and head.config.markov_rank else None


def copy_of(head: Head) -> Head:
    """Another head with the same weights."""
    ids = [int(token) for token in head.ids]
    copy = BlockHead(head.config, ids) if isinstance(head, BlockHead) else EagleHead(head.config, ids)
    copy.load_state_dict(head.state_dict())
    return copy.eval()


def useful_anchors(head: Head, most: int) -> int:
    """How many anchors of a text are worth computing, where `most` are asked for: an EAGLE head has all."""
    return most if isinstance(head, BlockHead) else torch.iinfo(torch.int64).max
