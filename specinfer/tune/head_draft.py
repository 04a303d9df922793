"""Draft heads as trainable drafts, their kinds, and exported heads to resume from.

Guesses are conditioned on the true tokens, at anchors of the texts (dataset.py). A block head computes the
rows of its blocks. An EAGLE head computes every row of the text, and feeds each step the output of the step
before, as it does at inference: it reads its previous hidden states, over the true tokens.

Shapes: B texts, A anchors per text, L levels, N taps, D the head's hidden size, U tokens in its vocabulary.
"""

from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from specinfer.errors import ModelError, TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head
from specinfer.heads.config import BlockConfig, EagleConfig, MtpConfig, check_target
from specinfer.heads.eagle import EagleHead
from specinfer.heads.mtp import MtpFile
from specinfer.heads.mtp_head import MtpHead, mtp_head, write_mtp
from specinfer.heads.speculators import write_head
from specinfer.hub import resolve
from specinfer.models.config import Family, ModelConfig
from specinfer.models.fingerprint import fingerprint
from specinfer.models.hf_config import ARCHITECTURES
from specinfer.models.next_layer import one_layer
from specinfer.tune.dataset import BlockBatch, TrainingSet, first_texts
from specinfer.tune.draft import Description, Kind, LossOf, Say, Target, TrainableDraft, entries_of
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
        head = self.folded()
        assert not isinstance(head, MtpHead), "it has another layout"
        write_head(
            head,
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
    anchors = 64

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

    head: EagleHead | MtpHead
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


class MtpDraft(EagleHeadDraft):
    """An MTP layer, which reads unscaled hidden states; a step computes every position of a text."""

    head: MtpHead

    def folded(self) -> MtpHead:
        """A copy of it."""
        return self.copy().head

    def write(self, folder: Path, target: Target) -> None:
        """Write it as a folder that holds the layer alone."""
        write_mtp(self.folded(), folder)

    def description(self) -> Description:
        """Description for the model card."""
        does = "guesses a level of a tree in each pass, with its target's output layer"
        return self._description("specinfer", "mtp", "MTP layer (`mtp.*` as in Qwen3-Next)", does)


def wrap_head(head: Head, scale_ND: Tensor) -> BlockHeadDraft | EagleHeadDraft:
    """Wrap a head as a draft."""
    if isinstance(head, MtpHead):
        return MtpDraft(head, scale_ND)
    if isinstance(head, BlockHead):
        return BlockHeadDraft(head, scale_ND)
    return EagleHeadDraft(head, scale_ND)


def open_initial_head(
    name: str, wanted: BlockConfig | EagleConfig | MtpConfig, vocabulary: int | None, target: ModelConfig
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


@dataclass(frozen=True, kw_only=True)
class TrainableHeadKind(Kind):
    """A head whose layers have the sizes of the target's."""

    layers: int = 1
    depth: int = 5  # number of consecutive tokens that it learns to predict
    # maximum number of tokens in its vocabulary; None: the default, or as the head in `init`
    vocabulary: int | None = None

    family: ClassVar[Family]  # of its layers
    # True if it can be initialized from its target's layers, which is then the default.
    begins_as_target: ClassVar[bool] = False

    @abstractmethod
    def shape(self, target: ModelConfig, **common: Any) -> BlockConfig | EagleConfig | MtpConfig:
        """The head's config; `common` has the fields of all heads."""

    def config(self, target: ModelConfig) -> BlockConfig | EagleConfig | MtpConfig:
        """The head's config; raises ModelError for unsupported targets."""
        check_trainable(target)
        config = self.shape(
            target,
            body=head_body_config(target, self.family, self.layers),
            taps=self.taps(target),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or DEFAULT_VOCABULARY, target.vocab_size),
        )
        check_target(config, target, "to be trained")
        return config

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        if init == "target" and not self.begins_as_target:
            raise TuneError(
                "init is target, which is for block heads and for small models; allowed: random, or a head"
            )
        config = self.config(target)
        if init not in (None, "target", "random"):
            open_initial_head(init, config, self.vocabulary, target)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """An early layer, one in the middle and one near the end, as in EAGLE-3."""
        layers = target.num_layers
        return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))

    def facts(self) -> dict[str, object]:
        """The head's shape."""
        return {"kind": self.name, **asdict(self), "vocabulary": self.vocabulary or DEFAULT_VOCABULARY}

    def new(
        self, init: str | None, target: Target, dataset: TrainingSet, seed: int, loss_of: LossOf, say: Say
    ) -> HeadDraft:
        """A head initialized from the target, at random, or from an exported head."""
        config = self.config(target.config)
        scale_ND = hidden_scale(dataset)
        init = init or ("target" if self.begins_as_target else "random")
        if init not in ("target", "random"):
            known = open_initial_head(init, config, self.vocabulary, target.config).module(target.model)
            with torch.no_grad():
                known.fc.weight.div_(scale_ND.flatten())
            return wrap_head(known, scale_ND)
        ids = frequent_tokens(dataset.corpus, config.draft_vocab_size, config.body.vocab_size)
        head = new_head(config, target.model, ids, seed)
        draft = wrap_head(head, scale_ND)
        if init == "target":
            assert isinstance(head, BlockHead)  # no other kind of head begins as its target
            fit_bigrams(head, dataset, entries_of(draft))
            copy_target_layers(head, target.model, first_texts(dataset, _INIT_TEXTS), scale_ND)
            say(f"the head begins with a loss of {calibrate_norm(draft, loss_of):.2f}")
        return draft

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> HeadDraft:
        """A head of this shape with these tokens as its vocabulary."""
        return wrap_head(new_head(self.config(target.config), target.model, ids, 0), scale_ND)


@dataclass(frozen=True, kw_only=True)
class BlockKind(TrainableHeadKind):
    """A causal block head: rows begin with the target's last hidden state, and its output layer is used."""

    name = "block"
    family = Family.QWEN3
    begins_as_target = True
    markov_rank: int = 64  # rank of the term that conditions a guess on the token before it

    def shape(self, target: ModelConfig, **common: Any) -> BlockConfig:
        """The mask token is the target's end of text, which is never the anchor of a block."""
        return BlockConfig(
            **common,
            block_size=self.depth,
            mask_token_id=target.eos_ids[0] if target.eos_ids else 0,
            markov_rank=self.markov_rank,
            reads_last=True,
            own_head=False,
        )


@dataclass(frozen=True, kw_only=True)
class EagleKind(TrainableHeadKind):
    """A head that makes one pass per level."""

    name = "eagle"
    family = Family.LLAMA

    def shape(self, target: ModelConfig, **common: Any) -> EagleConfig:
        """A head of this depth."""
        return EagleConfig(**common, depth=self.depth)


@dataclass(frozen=True, kw_only=True)
class MtpKind(TrainableHeadKind):
    """An MTP layer in the form of the target's own layers; it makes one pass per level."""

    name = "mtp"
    family = Family.LLAMA

    def shape(self, target: ModelConfig, **common: Any) -> MtpConfig:
        """A layer of this depth."""
        return MtpConfig(**{**common, "body": one_layer(target)}, depth=self.depth, own_head=False)

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        self.config(target)
        if self.layers != 1:
            raise TuneError(f"layers is {self.layers} with kind mtp; allowed: 1")
        if self.vocabulary is not None:
            raise TuneError(
                f"vocabulary is {self.vocabulary} with kind mtp, which guesses any token; leave it out"
            )
        if target.rope is None or target.rope.rotated is not None:
            raise ModelError("no MTP layer can be trained for models with partial rotary embeddings yet")
        if init == "target":
            raise TuneError("init is target with kind mtp; allowed: random, or a folder of such a layer")
        if init not in (None, "random"):
            MtpFile(resolve(init), target)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """The output of the last layer."""
        return (target.num_layers,)

    def new(
        self, init: str | None, target: Target, dataset: TrainingSet, seed: int, loss_of: LossOf, say: Say
    ) -> MtpDraft:
        """A random layer, or one of a folder."""
        config, unscaled = self.config(target.config), torch.ones(1, target.config.hidden_size)
        if init not in (None, "random"):
            file = MtpFile(resolve(init), target.config)
            return MtpDraft(mtp_head(file, target.model, self.depth), unscaled)
        ids = frequent_tokens(dataset.corpus, config.draft_vocab_size, config.body.vocab_size)
        head = new_head(config, target.model, ids, seed)
        assert isinstance(head, MtpHead)
        with torch.no_grad():
            scale_ND = hidden_scale(dataset, lambda taps_TND: head.fused(taps_TND)[:, None])
            head.hnorm.weight.copy_(scale_ND[0])
        return MtpDraft(head, unscaled)
