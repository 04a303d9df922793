"""Block heads and EAGLE heads as kinds of draft: config for a target, and initial weights."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar, Final

from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig, check_target
from specinfer.models.config import Family, ModelConfig
from specinfer.tune.dataset import first_texts
from specinfer.tune.draft import Initialization, Kind, Target, entries_of
from specinfer.tune.head_draft import (
    DEFAULT_ANCHORS,
    HeadDraft,
    open_initial_head,
    read_initial_head,
    wrap_head,
)
from specinfer.tune.initial_head import (
    DEFAULT_VOCABULARY,
    Head,
    calibrate_norm,
    check_trainable,
    copy_target_layers,
    fit_bigrams,
    frequent_tokens,
    head_body_config,
    hidden_scale,
    new_head,
)

_INIT_TEXTS: Final = 1000  # texts used to initialize a head from its target


@dataclass(frozen=True, kw_only=True)
class TrainableHeadKind(Kind):
    """A head whose layers have the sizes of the target's."""

    layers: int = 1
    depth: int = 5  # number of consecutive tokens that it learns to predict
    # maximum number of tokens in its vocabulary; None: the default, or as the head in `init`
    vocabulary: int | None = None

    # True if it can be initialized from its target's layers, which is then the default.
    begins_as_target: ClassVar[bool] = False

    @abstractmethod
    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> BlockConfig | EagleConfig:
        """The head's config; raises ModelError for unsupported targets."""

    def draft(self, head: Head, scale_ND: Tensor) -> HeadDraft:
        """The head as a draft."""
        return wrap_head(head, scale_ND)

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        if init == "target" and not self.begins_as_target:
            raise TuneError(
                "init is target, which is for block heads and for small models; allowed: random, or a head"
            )
        config = self.config(target, default_taps(target))
        if init not in (None, "target", "random"):
            open_initial_head(init, config, self.vocabulary, target)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """An early layer, one in the middle, one near the end."""
        return default_taps(target)

    def facts(self) -> dict[str, object]:
        """The head's shape."""
        return {"kind": self.name, **asdict(self), "vocabulary": self.vocabulary or DEFAULT_VOCABULARY}

    def new(self, init: str | None, initialization: Initialization) -> HeadDraft:
        """A head initialized from the target, at random, or from an exported head."""
        target, dataset = initialization.target, initialization.dataset
        config = self.config(target.config, default_taps(target.config))
        scale_ND = hidden_scale(dataset)
        init = init or ("target" if self.begins_as_target else "random")
        if init not in ("target", "random"):
            known = read_initial_head(init, config, self.vocabulary, target.model, scale_ND)
            return self.draft(known, scale_ND)
        ids = frequent_tokens(dataset.corpus, config.draft_vocab_size, config.body.vocab_size)
        head = new_head(config, target.model, ids, initialization.seed)
        draft = self.draft(head, scale_ND)
        if init == "target":
            assert isinstance(head, BlockHead)  # no other kind of head begins as its target
            fit_bigrams(head, dataset, entries_of(draft))
            copy_target_layers(head, target.model, first_texts(dataset, _INIT_TEXTS), scale_ND)
            initialization.say(
                f"the head begins with a loss of {calibrate_norm(draft, initialization.loss_of):.2f}"
            )
        return draft

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> HeadDraft:
        """A head of this shape with these tokens as its vocabulary."""
        config = self.config(target.config, default_taps(target.config))
        return self.draft(new_head(config, target.model, ids, 0), scale_ND)


@dataclass(frozen=True, kw_only=True)
class BlockKind(TrainableHeadKind):
    """A causal block head: rows begin with the target's last hidden state, and its output layer is used."""

    name = "block"
    begins_as_target = True
    markov_rank: int = 64  # rank of the term that conditions a guess on the token before it
    anchors: int = DEFAULT_ANCHORS  # maximum anchors per text in a step

    def draft(self, head: Head, scale_ND: Tensor) -> HeadDraft:
        """The head as a draft."""
        return wrap_head(head, scale_ND, self.anchors)

    def facts(self) -> dict[str, object]:
        """The head's shape; `anchors` is a training option and left out."""
        facts = super().facts()
        del facts["anchors"]
        return facts

    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> BlockConfig:
        """A head whose layers have the sizes of the target's.

        The mask token is the target's end of text, which is never the anchor of a block. Raises ModelError
        for unsupported targets.
        """
        check_trainable(target)
        config = BlockConfig(
            body=head_body_config(target, Family.QWEN3, self.layers),
            taps=taps,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or DEFAULT_VOCABULARY, target.vocab_size),
            block_size=self.depth,
            mask_token_id=target.eos_ids[0] if target.eos_ids else 0,
            markov_rank=self.markov_rank,
            reads_last=True,
            own_head=False,
        )
        check_target(config, target, "to be trained")
        return config


@dataclass(frozen=True, kw_only=True)
class EagleKind(TrainableHeadKind):
    """A head that makes one pass per level."""

    name = "eagle"

    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> EagleConfig:
        """A head whose layers have the sizes of the target's; raises ModelError for unsupported targets."""
        check_trainable(target)
        config = EagleConfig(
            body=head_body_config(target, Family.LLAMA, self.layers),
            taps=taps,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or DEFAULT_VOCABULARY, target.vocab_size),
            depth=self.depth,
        )
        check_target(config, target, "to be trained")
        return config


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """The tapped layers: an early one, one in the middle and one near the end, as in EAGLE-3."""
    layers = target.num_layers
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))
