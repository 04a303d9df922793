"""Block heads and EAGLE heads as kinds of draft: their sizes for a target, and what they begin as."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Final, Literal

from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig, check_target
from specinfer.models.config import Family, ModelConfig
from specinfer.tune.dataset import first_texts
from specinfer.tune.draft import Beginning, Kind, Target, entries_of
from specinfer.tune.head_draft import (
    USUAL_ANCHORS,
    HeadDraft,
    draft_of,
    known_folder,
    known_head,
    widened,
)
from specinfer.tune.initial_head import (
    USUAL_VOCABULARY,
    Head,
    begin_as_target,
    body_of,
    check_trainable,
    frequent_tokens,
    learn_pairs,
    new_head,
    scale_of,
    tune_loudness,
)

Layout = Literal["specinfer", "dspark"]
_SOLVED_BY: Final = 1000  # texts by which a head begins as its target


@dataclass(frozen=True, kw_only=True)
class TrainableHeadKind(Kind):
    """A head whose layers have the sizes of the target's."""

    layers: int = 1
    depth: int = 5  # tokens on end that it learns to guess
    vocabulary: int | None = None  # tokens it can name, at most; None: as usual, or as one to go on from

    @property
    def begins_as_target(self) -> bool:
        """Whether it can begin with its target's layers, which is what it does then as a rule."""
        return False

    @abstractmethod
    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> BlockConfig | EagleConfig:
        """The head's config; raises ModelError for targets it does not fit."""

    def draft(self, head: Head, scale_ND: Tensor) -> HeadDraft:
        """The head as a draft."""
        return draft_of(head, scale_ND)

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        if init == "target" and not self.begins_as_target:
            raise TuneError(
                "init is target, which is for block heads of layout specinfer and for small models; allowed: "
                "random, or a head"
            )
        config = self.config(target, default_taps(target))
        if init not in (None, "target", "random"):
            known_folder(init, config, self.vocabulary, target)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """An early layer, one in the middle, one near the end."""
        return default_taps(target)

    def facts(self) -> dict[str, object]:
        """The head's shape."""
        return {"kind": self.name, **asdict(self), "vocabulary": self.vocabulary or USUAL_VOCABULARY}

    def new(self, init: str | None, beginning: Beginning) -> HeadDraft:
        """A head that knows what can be had without learning, a random one, or an exported one."""
        target, dataset = beginning.target, beginning.dataset
        config = self.config(target.config, default_taps(target.config))
        scale_ND = scale_of(dataset)
        init = init or ("target" if self.begins_as_target else "random")
        if init not in ("target", "random"):
            known = known_head(init, config, target.model, scale_ND)
            return self.draft(widened(known, self.vocabulary, beginning), scale_ND)
        ids = frequent_tokens(dataset.corpus, config.draft_vocab_size, config.body.vocab_size)
        head = new_head(config, target.model, ids, beginning.seed)
        draft = self.draft(head, scale_ND)
        if init == "target":
            assert isinstance(head, BlockHead)  # no other begins so
            learn_pairs(head, dataset, entries_of(draft))
            begin_as_target(head, target.model, first_texts(dataset, _SOLVED_BY), scale_ND)
            beginning.say(f"the head begins with a loss of {tune_loudness(draft, beginning.loss_of):.2f}")
        return draft

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> HeadDraft:
        """A head of this shape that can name these tokens."""
        config = self.config(target.config, default_taps(target.config))
        return self.draft(new_head(config, target.model, ids, 0), scale_ND)


@dataclass(frozen=True, kw_only=True)
class BlockKind(TrainableHeadKind):
    """A causal block head."""

    name = "block"
    # Rows begin with the target's last hidden state, and its output layer is used; or, as vLLM reads it, rows
    # begin with embeddings, and the output layer is the head's own.
    layout: Layout = "specinfer"
    markov_rank: int = 64  # of the term by which a guess depends on the token before it
    anchors: int = USUAL_ANCHORS  # of a text that a step computes, at most

    @property
    def begins_as_target(self) -> bool:
        """In the layout that reads the target's last hidden state."""
        return self.layout == "specinfer"

    def draft(self, head: Head, scale_ND: Tensor) -> HeadDraft:
        """The head as a draft."""
        return draft_of(head, scale_ND, self.anchors)

    def facts(self) -> dict[str, object]:
        """The head's shape; anchors are how it is trained."""
        facts = super().facts()
        del facts["anchors"]
        return facts

    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> BlockConfig:
        """A head whose layers have the sizes of the target's.

        The tokens behind a block's anchor are guessed from rows of the target's end of text, from which no
        block ever hangs. Raises ModelError for targets it does not fit.
        """
        check_trainable(target)
        config = BlockConfig(
            body=body_of(target, Family.QWEN3, self.layers),
            taps=taps,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or USUAL_VOCABULARY, target.vocab_size),
            block_size=self.depth,
            mask_token_id=target.eos_ids[0] if target.eos_ids else 0,
            markov_rank=self.markov_rank,
            reads_last=self.layout == "specinfer",
            own_head=self.layout != "specinfer",
        )
        check_target(config, target, "to be trained")
        return config


@dataclass(frozen=True, kw_only=True)
class EagleKind(TrainableHeadKind):
    """A head that makes a pass a level."""

    name = "eagle"

    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> EagleConfig:
        """A head whose layers have the sizes of the target's; raises ModelError where it does not fit."""
        check_trainable(target)
        config = EagleConfig(
            body=body_of(target, Family.LLAMA, self.layers),
            taps=taps,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or USUAL_VOCABULARY, target.vocab_size),
            depth=self.depth,
        )
        check_target(config, target, "to be trained")
        return config


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """The layers a head reads: an early one, one in the middle and one near the end, as EAGLE-3 does."""
    layers = target.num_layers
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))
