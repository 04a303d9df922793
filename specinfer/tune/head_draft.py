"""Heads as drafts that learn: what each kind guesses along known texts.

Guesses are made behind the true tokens, at anchors of the texts (blocks.py). A block head computes the rows
of its blocks. An EAGLE head computes every row of the text, and each of its steps with what the step before
put out, as it does when it guesses: a chain of its own hidden states, over tokens that came.

Shapes: B texts, A anchors a text, L levels, N taps, D the head's hidden size, U tokens it can name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor, nn

from specinfer.heads.block import BlockHead
from specinfer.heads.eagle import EagleHead
from specinfer.heads.layers import Norm
from specinfer.heads.speculators import write_head
from specinfer.models.config import Family
from specinfer.models.fingerprint import fingerprint
from specinfer.tune.blocks import Blocks
from specinfer.tune.draft import Description, Target

_ALL: Final = torch.iinfo(torch.int64).max
_ARCHITECTURES: Final = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}


class HeadDraft(ABC):
    """A head, and what the hidden states that it reads are multiplied by; a Draft."""

    def __init__(self, head: BlockHead | EagleHead, scale_ND: Tensor) -> None:
        self.module: nn.Module = head
        self.scale_ND = scale_ND
        self._head = head

    @property
    def ids(self) -> Tensor:
        """The tokens it can name."""
        return self._head.ids

    @property
    def vocab(self) -> int:
        """How many tokens its target has."""
        return self._head.config.body.vocab_size

    @property
    def depth(self) -> int:
        """The levels that are measured."""
        return self._head.config.depth

    @property
    def learnt_depth(self) -> int:
        """The levels that are learnt."""
        return self.depth

    @property
    @abstractmethod
    def one_pass(self) -> bool:
        """Whether it guesses all levels of a tree in one pass."""

    @property
    @abstractmethod
    def anchors(self) -> int:
        """How many anchors of a text a step computes, at most."""

    @property
    def last_norm(self) -> Norm:
        """The norm before the output layer."""
        return self._head.norm

    @abstractmethod
    def guessed(self, batch: Blocks, levels: int) -> Tensor:
        """What the output layer reads of so many levels behind every anchor, [B, A, L, D]."""

    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """The logits [..., S] of rows [..., D]: of entries of `ids`, or of all."""
        if entries_S is None:
            return self._head.logits(h)
        return h @ self._head.lm_head.weight[entries_S].T

    @abstractmethod
    def copy(self) -> Self:
        """Another one with weights of its own, which are the same."""

    def folded(self) -> BlockHead | EagleHead:
        """A copy of the head that reads hidden states as the target leaves them."""
        head = self.copy()._head
        with torch.no_grad():
            head.fc.weight.mul_(self.scale_ND.flatten())
        return head

    def write(self, folder: Path, target: Target) -> None:
        """Write it in the layout of `speculators`."""
        write_head(
            self.folded(),
            folder,
            verifier=target.name,
            architectures=[_ARCHITECTURES[target.config.family]],
            dtype=torch.bfloat16,
            fingerprint=fingerprint(target.model),
        )

    @abstractmethod
    def described(self) -> Description:
        """What a card says of it."""

    def _described(self, tag: str, kind: str, does: str, *, ours: bool) -> Description:
        config = self._head.config
        body = config.body
        layout = "that specinfer alone reads" if ours else f"`speculators` layout, {tag}"
        return Description(
            library="specinfer" if ours else "speculators",  # what reads it
            tag="block-head" if ours else tag,
            title="draft head",
            does=f"reads the hidden states of its target and {does}",
            kind=f"{kind} ({layout}), {body.num_layers} layer(s) of {body.hidden_size}",
            reads=f"what the target's layers {', '.join(str(tap) for tap in config.taps)} are given",
            of_target="matrices and norms that began as its own unless told otherwise, which learnt on",
        )


class BlockHeadDraft(HeadDraft):
    """A block head: a step computes the rows of some blocks."""

    def __init__(self, head: BlockHead, scale_ND: Tensor, anchors: int) -> None:
        """`anchors` of a text a step computes, at most."""
        super().__init__(head, scale_ND)
        self.head = head
        self._anchors = anchors

    @property
    def one_pass(self) -> bool:
        """It does."""
        return True

    @property
    def anchors(self) -> int:
        """How many anchors of a text a step computes, at most."""
        return self._anchors

    def guessed(self, batch: Blocks, levels: int) -> Tensor:
        """The rows of blocks, as many as there are levels."""
        given = batch.taps_BTND, batch.anchor_ids_BA, batch.anchors_BA
        read: Tensor = self.head(*given, levels)
        return read

    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """The output layer's, and the Markov term's where the head has one."""
        logits = super().logits(h, before, entries_S)
        if not self.head.config.markov_rank:
            return logits
        return logits + self.head.pair_logits(before, entries_S)

    def copy(self) -> BlockHeadDraft:
        """Another one with weights of its own, which are the same."""
        copy = BlockHead(self.head.config, self.head.ids.tolist())
        copy.load_state_dict(self.head.state_dict())
        return BlockHeadDraft(copy.eval(), self.scale_ND, self._anchors)

    def described(self) -> Description:
        """What a card says of it."""
        config = self.head.config
        does = f"guesses {config.depth} tokens in one pass"
        return self._described("dspark", "causal block head", does, ours=config.reads_last)


class EagleHeadDraft(HeadDraft):
    """An EAGLE head: all places of a text are computed in a step."""

    def __init__(self, head: EagleHead, scale_ND: Tensor) -> None:
        super().__init__(head, scale_ND)
        self.head = head

    @property
    def one_pass(self) -> bool:
        """Where it is one of P-EAGLE's."""
        return self.head.config.mask_token_id is not None

    @property
    def anchors(self) -> int:
        """All of a text's."""
        return _ALL

    def guessed(self, batch: Blocks, levels: int) -> Tensor:
        """Each row's steps, of which anchors are chosen."""
        rows = batch.taps_BTND.shape[1]
        # Row t is of token t + 1, and its step s of the token s behind that.
        ids_BTS = batch.tokens_BT[:, 1:].unfold(1, levels, 1)[:, :rows]
        read_BTSD: Tensor = self.head(ids_BTS, batch.taps_BTND)
        at_BA11 = (batch.anchors_BA - 1)[..., None, None]
        return read_BTSD.gather(1, at_BA11.expand(-1, -1, *read_BTSD.shape[2:]))

    def copy(self) -> EagleHeadDraft:
        """Another one with weights of its own, which are the same."""
        copy = EagleHead(self.head.config, self.head.ids.tolist())
        copy.load_state_dict(self.head.state_dict())
        return EagleHeadDraft(copy.eval(), self.scale_ND)

    def described(self) -> Description:
        """What a card says of it."""
        return self._described("eagle3", "EAGLE-3 head", "guesses a level of a tree in each pass", ours=False)
