"""Members on one trunk as a kind of draft: a block head that learns no more, and what learns on it.

A member is trained beside its trunk alone, as a head with one member; those that are kept become one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead, Member
from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.config import ModelConfig
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.draft import Beginning, Target
from specinfer.tune.head_draft import BlockHeadDraft
from specinfer.tune.new_head import scale_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberKind:
    """A member on the block head in a folder: a kind of Draft, of which nothing but the member learns."""

    name: ClassVar[str] = "block"
    trunk: Path
    kind: BlockKind  # the trunk's

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        self.kind.check(target, init)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """The trunk's."""
        return self.kind.taps(target)

    def facts(self) -> dict[str, object]:
        """The trunk's shape."""
        return self.kind.facts() | {"on_trunk": True}

    def new(self, init: str | None, beginning: Beginning) -> BlockHeadDraft:
        """A member that guesses what its trunk does, or what the one exported in the folder `init` does."""
        scale_ND = scale_of(beginning.lessons)
        return self._draft(beginning.target, scale_ND, None if init is None else Path(init))

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> BlockHeadDraft:
        """A member that guesses what its trunk does; raises TuneError where that names other tokens."""
        draft = self._draft(target, scale_ND, None)
        if draft.ids.tolist() != ids:
            raise TuneError(f"the head in {self.trunk} names other tokens than it did; remove its members")
        return draft

    def _draft(self, target: Target, scale_ND: Tensor, known: Path | None) -> BlockHeadDraft:
        trunk = block_head(self.trunk, target)
        member = Member(trunk.config)
        if known is not None:
            [member] = members_of(block_head(known, target))
        elif trunk.config.markov_rank:
            member.markov_w1.load_state_dict(trunk.markov_head.markov_w1.state_dict())
        head = with_members(trunk, [member])
        head.requires_grad_(False)
        head.members.requires_grad_(True)
        with torch.no_grad():
            head.fc.weight.div_(scale_ND.flatten())
        return BlockHeadDraft(head, scale_ND, self.kind.anchors, 1)


def block_head(folder: Path, target: Target) -> BlockHead:
    """The block head in a folder, which reads hidden states as the target leaves them.

    Raises TuneError where that is no block head, ModelError and its kind where it does not fit the target.
    """
    head = HeadFolder(folder, target.config).module(target.model)
    if not isinstance(head, BlockHead):
        raise TuneError(f"{folder} holds another head than a block head, on which members could be")
    return head


def members_of(head: BlockHead) -> list[Member]:
    """What the members on a head have of their own."""
    found = [*head.members] if head.config.members else []
    return [member for member in found if isinstance(member, Member)]


def with_members(trunk: BlockHead, members: Sequence[Member]) -> BlockHead:
    """A head of its own that is this one, with these members on it alone."""
    head = BlockHead(replace(trunk.config, members=len(members)), trunk.ids.tolist())
    own = {name: tensor for name, tensor in trunk.state_dict().items() if not name.startswith("members.")}
    head.load_state_dict(own, strict=False)
    for mine, member in zip(members_of(head), members, strict=True):
        mine.load_state_dict(member.state_dict())
    return head.eval()
