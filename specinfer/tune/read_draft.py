"""A draft that was written, as it guesses along known texts."""

from __future__ import annotations

from pathlib import Path

import torch

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head
from specinfer.heads.config import MedusaConfig
from specinfer.heads.eagle import EagleHead
from specinfer.hub import resolve
from specinfer.models.weights import open_model
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.draft import Draft, Target
from specinfer.tune.head_draft import BlockHeadDraft, EagleHeadDraft
from specinfer.tune.ssm_kind import read_small


def open_head(folder: Path, target: Target) -> HeadFolder:
    """The head in a folder; raises ModelError and its kind where it cannot be used, or is none of ours."""
    head = HeadFolder(folder, target.config)
    if isinstance(head.config, MedusaConfig):
        raise ModelError(f"{folder} holds Medusa's heads, which cannot be measured; name another draft")
    return head


def read_draft(folder: Path, target: Target, depth: int) -> Draft:
    """The head or small model in a folder, which reads hidden states as the target leaves them.

    `depth` is how many levels of a small model are measured; a head has its own. Raises ModelError and its
    kind where it cannot be used, or has another vocabulary than the target.
    """
    if not is_head(folder):
        small = open_model(resolve(str(folder)))
        if small.config.vocab_size != target.config.vocab_size:
            raise ModelError(
                f"{folder} has {small.config.vocab_size} tokens, and {target.name} "
                f"{target.config.vocab_size}; drafts that are measured have their target's vocabulary"
            )
        return read_small(small, depth)
    head = open_head(folder, target).module(target.model)
    assert isinstance(head, BlockHead | EagleHead)  # as open_head has seen
    scale_ND = torch.ones(len(head.config.taps), head.config.target_hidden_size)
    if isinstance(head, BlockHead):
        return BlockHeadDraft(head, scale_ND, BlockKind().anchors)
    return EagleHeadDraft(head, scale_ND)
