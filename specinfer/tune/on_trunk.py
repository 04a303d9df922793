"""A trunk and the members that were trained on it, as one head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specinfer.files import NewFile
from specinfer.heads.block import BlockHead
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.card import Material, card
from specinfer.tune.draft import Target
from specinfer.tune.head_draft import BlockHeadDraft
from specinfer.tune.held_out import Along, along, figures_of
from specinfer.tune.member_kind import block_head, members_of, with_members
from specinfer.tune.pooling import Selection, Trained, members_card
from specinfer.tune.shards import TunedText
from specinfer.tune.trainer import Trainer


def renew(folder: Path, trunk: Path, target: Target) -> None:
    """Put a trunk that may have learnt on under the member in a folder, if there is one; raises OSError."""
    if (folder / "config.json").exists():
        member = members_of(block_head(folder, target))
        _draft(with_members(block_head(trunk, target), member)).write(folder, target)


def joined(folder: Path, members: Sequence[Trained], target: Target, texts: Sequence[TunedText]) -> Trained:
    """Write the first of these with all others on it, and measure that along held-out texts."""
    trunk, *others = [block_head(one.folder, target) for one in members]
    head = with_members(trunk, [member for one in others for member in members_of(one)])
    _draft(head).write(folder, target)
    found: list[Along] = [along(_draft(head, member), texts) for member in range(len(members))]
    return Trained(folder, _draft(head), found[0], found[1:])


def write_selected(
    out: Path,
    target: Target,
    whole: Trained,
    selection: Selection,
    material: Material,
    trunk: Trainer,
    loss: str,
) -> None:
    """Write the trunk with the members that pay, and its card; raises OSError.

    `trunk` is its training, `loss` what all were trained by.
    """
    head = block_head(whole.folder, target)
    kept = sorted(selection.best.members)[1:]
    draft = _draft(with_members(head, [members_of(head)[number - 1] for number in kept]))
    (out / "README.md").unlink(missing_ok=True)  # whoever is killed here leaves no card of another head
    draft.write(out, target)
    text = card(draft.described(), material, trunk, loss, figures_of(whole.along))
    with NewFile(out / "README.md", mode=0o644) as new:
        new.write((text + members_card(selection)).encode())
        new.keep()


def _draft(head: BlockHead, member: int = 0) -> BlockHeadDraft:
    """A head that reads hidden states as the target leaves them."""
    scale_ND = torch.ones(len(head.config.taps), head.config.target_hidden_size)
    return BlockHeadDraft(head, scale_ND, BlockKind().anchors, member)
