"""A draft that was written, as it guesses along known texts."""

from __future__ import annotations

from pathlib import Path

import torch

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head, open_head
from specinfer.heads.config import EagleConfig, MedusaConfig
from specinfer.heads.eagle import EagleHead
from specinfer.hub import resolve
from specinfer.models.weights import OpenModel, open_model
from specinfer.tokenizer.vocabulary import Vocabulary
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.draft import Draft, Target
from specinfer.tune.head_draft import BlockHeadDraft, EagleHeadDraft
from specinfer.tune.ssm_kind import read_small


def open_draft(folder: Path, target: Target) -> HeadFolder | OpenModel:
    """The head or small model in a folder, with the target's tokens; reads no weights.

    Raises ModelError and its kind where it cannot be used, or cannot be measured along known texts.
    """
    if is_head(folder):
        head = open_head(folder, target.model)
        if isinstance(head.config, MedusaConfig):
            raise ModelError(f"{folder} holds Medusa's heads, which cannot be measured; name another draft")
        if isinstance(head.config, EagleConfig) and head.config.fc_reads_token:
            raise ModelError(f"{folder} holds an EAGLE-1 or 2, which cannot be measured; name another draft")
        return head
    files = resolve(str(folder))
    small = open_model(files)
    sizes = small.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1] or not Vocabulary(target.files).same_ids(Vocabulary(files)):
        have = f"{sizes[0]} tokens, and {target.name} {sizes[1]}"
        if sizes[0] == sizes[1]:
            have = f"other tokens than {target.name}, though as many"
        raise ModelError(f"{folder} has {have}; drafts that are measured have their target's vocabulary")
    return small


def read_draft(folder: Path, target: Target, depth: int) -> Draft:
    """The head or small model in a folder, which reads hidden states as the target leaves them.

    `depth` is how many levels of a small model are measured; a head has its own. Raises as `open_draft`.
    """
    opened = open_draft(folder, target)
    if not isinstance(opened, HeadFolder):
        return read_small(opened, depth)
    head = opened.module(target.model)
    assert isinstance(head, BlockHead | EagleHead)  # as open_draft has seen
    scale_ND = torch.ones(len(head.config.taps), head.config.target_hidden_size)
    if isinstance(head, BlockHead):
        return BlockHeadDraft(head, scale_ND, BlockKind().anchors)
    return EagleHeadDraft(head, scale_ND)
