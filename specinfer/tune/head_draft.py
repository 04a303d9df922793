"""Draft heads as trainable drafts, and exported heads to resume from.

Guesses are conditioned on the true tokens, at anchors of the texts (dataset.py). A block head computes the
rows of its blocks. An EAGLE head computes every row of the text, and feeds each step the output of the step
before, as it does at inference: it reads its previous hidden states, over the true tokens.

Shapes: B texts, A anchors per text, L levels, N taps, D the head's hidden size, U tokens in its vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.speculators import write_head
from specinfer.hub import resolve
from specinfer.models.config import ModelConfig
from specinfer.models.fingerprint import fingerprint
from specinfer.models.hf_config import ARCHITECTURES
from specinfer.models.open_model import OpenModel
from specinfer.tune.dataset import BlockBatch
from specinfer.tune.draft import Description, Target, TrainableDraft
from specinfer.tune.initial_head import Head

DEFAULT_ANCHORS: Final = 64  # maximum anchors per text in a step of a block head


class HeadDraft(TrainableDraft):
    """A head with the factors applied to the hidden states it reads."""

    head: Head

    def __init__(self, head: Head, scale_ND: Tensor) -> None:
        self.module = self.head = head
        self.scale_ND = scale_ND
        self.ids = head.ids
        self.vocab = head.config.body.vocab_size
        self.depth = self.trained_depth = head.config.depth
        self.last_norm = head.norm

    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """Logits of the output layer."""
        if entries_S is None:
            return self.head.logits(h)
        return h @ self.head.lm_head.weight[entries_S].T

    def folded(self) -> Head:
        """A copy of the head that reads unscaled hidden states."""
        head = self.copy().head
        with torch.no_grad():
            head.fc.weight.mul_(self.scale_ND.flatten())
        return head

    def write(self, folder: Path, target: Target) -> None:
        """Write it in the layout of `speculators`."""
        write_head(
            self.folded(),
            folder,
            verifier=target.name,
            architectures=[ARCHITECTURES[target.config.family]],
            dtype=torch.bfloat16,
            fingerprint=fingerprint(target.model),
        )

    def _description(self, library: str, tag: str, kind: str, does: str) -> Description:
        config = self.head.config
        body = config.body
        return Description(
            library=library,  # that reads it
            tag=tag,
            title="draft head",
            does=f"reads the hidden states of its target and {does}",
            kind=f"{kind}, {body.num_layers} layer(s) of {body.hidden_size}",
            reads=f"the inputs of the target's layers {', '.join(str(tap) for tap in config.taps)}",
            of_target="matrices and norms initialized from its own by default, then trained",
        )


class BlockHeadDraft(HeadDraft):
    """A block head: a step computes the rows of some blocks."""

    head: BlockHead
    one_pass = True

    def __init__(self, head: BlockHead, scale_ND: Tensor, anchors: int = DEFAULT_ANCHORS) -> None:
        """`anchors` is the maximum number of anchors per text in a step."""
        super().__init__(head, scale_ND)
        self.anchors = anchors

    def level_states(self, batch: BlockBatch, levels: int) -> Tensor:
        """Rows of blocks of `levels` levels."""
        given = batch.taps_BTND, batch.anchor_ids_BA, batch.anchors_BA
        read: Tensor = self.head(*given, levels)
        return read

    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """Logits of the output layer plus the Markov term, if the head has one."""
        logits = super().logits(h, before, entries_S)
        if not self.head.config.markov_rank:
            return logits
        return logits + self.head.pair_logits(before, entries_S)

    def description(self) -> Description:
        """Description for the model card."""
        does = f"guesses {self.head.config.depth} tokens in one pass"
        kind = "causal block head (that only specinfer reads)"
        return self._description("specinfer", "block-head", kind, does)


class EagleHeadDraft(HeadDraft):
    """An EAGLE head: a step computes every position of a text."""

    head: EagleHead
    one_pass = False

    def level_states(self, batch: BlockBatch, levels: int) -> Tensor:
        """The rows of each step, gathered at the anchors."""
        rows = batch.taps_BTND.shape[1]
        # Row t holds token t + 1; its step s holds the token s positions later.
        ids_BTS = batch.tokens_BT[:, 1:].unfold(1, levels, 1)[:, :rows]
        read_BTSD: Tensor = self.head(ids_BTS, batch.taps_BTND)
        at_BA11 = (batch.anchors_BA - 1)[..., None, None]
        return read_BTSD.gather(1, at_BA11.expand(-1, -1, *read_BTSD.shape[2:]))

    def description(self) -> Description:
        """Description for the model card."""
        does = "guesses a level of a tree in each pass"
        return self._description("speculators", "eagle3", "EAGLE-3 head (`speculators` layout)", does)


def wrap_head(
    head: Head, scale_ND: Tensor, anchors: int = DEFAULT_ANCHORS
) -> BlockHeadDraft | EagleHeadDraft:
    """Wrap a head as a draft; a step computes at most `anchors` anchors per text of a block head."""
    if isinstance(head, BlockHead):
        return BlockHeadDraft(head, scale_ND, anchors)
    return EagleHeadDraft(head, scale_ND)


def open_initial_head(
    name: str, wanted: BlockConfig | EagleConfig, vocabulary: int | None, target: ModelConfig
) -> HeadFolder:
    """Open an exported head to resume training; `name` is its folder. Reads no weights.

    A head of another target of the same sizes is accepted. Raises TuneError if its shape differs otherwise,
    or if it does not name `vocabulary` tokens (None: any number), and ModelError or a subclass if no head
    there fits the target.
    """
    files = resolve(name)
    if not is_head(files.path):
        raise TuneError(
            f"init is {name!r}, which is not a draft head; allowed: target, random, or a head's folder"
        )
    opened = HeadFolder(files, target)
    if opened.config != replace(wanted, draft_vocab_size=opened.config.draft_vocab_size):
        raise TuneError(
            f"the head {name} differs in shape from the configured one; give --kind, --layers, "
            "and --depth as it was trained, or leave --init out"
        )
    if vocabulary is not None and min(vocabulary, target.vocab_size) != len(opened.ids):
        raise TuneError(
            f"vocabulary is {vocabulary}, and the head to resume from has {len(opened.ids)} tokens; give as "
            "many, or leave it out"
        )
    return opened


def read_initial_head(
    name: str,
    wanted: BlockConfig | EagleConfig,
    vocabulary: int | None,
    target: OpenModel,
    scale_ND: Tensor,
) -> Head:
    """Read the weights of `open_initial_head` for training with scaled hidden states; raises as it does."""
    opened = open_initial_head(name, wanted, vocabulary, target.config)
    head = opened.module(target)
    with torch.no_grad():
        head.fc.weight.div_(scale_ND.flatten())
    return head
