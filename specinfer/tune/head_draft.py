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
from specinfer.heads.checkpoint import HeadFolder, is_head, target_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.speculators import write_head
from specinfer.heads.vocabulary import Tables
from specinfer.hub import resolve
from specinfer.models.config import ModelConfig
from specinfer.models.fingerprint import fingerprint
from specinfer.models.hf_config import ARCHITECTURES
from specinfer.models.open_model import OpenModel
from specinfer.tune.dataset import BlockBatch
from specinfer.tune.draft import Description, Initialization, Target, TrainableDraft
from specinfer.tune.initial_head import Head, likely_tokens, make_head

DEFAULT_ANCHORS: Final = 64  # maximum anchors per text in a step of a block head
_BIGRAMS: Final = "markov_head.markov_w2.weight"


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

    It keeps its own number of named tokens. A head of another target of the same sizes is accepted. Raises
    TuneError if its shape differs otherwise, or if it names more than `vocabulary` tokens, and ModelError or
    a subclass if no head there fits the target.
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
    _vocabulary_size(len(opened.ids), vocabulary, target.vocab_size)
    return opened


def read_initial_head(
    name: str, wanted: BlockConfig | EagleConfig, target: OpenModel, scale_ND: Tensor
) -> Head:
    """Read the weights of `open_initial_head` for training with scaled hidden states; raises as it does."""
    opened = open_initial_head(name, wanted, None, target.config)
    head = opened.module(target)
    with torch.no_grad():
        head.fc.weight.div_(scale_ND.flatten())
    return head


def with_vocabulary(head: Head, vocabulary: int | None, initialization: Initialization) -> Head:
    """Extend a head to name `vocabulary` tokens: its own and the likeliest others; None: its own alone.

    Raises TuneError if it names more already.
    """
    target, own = initialization.target, len(head.ids)
    count = _vocabulary_size(own, vocabulary, target.config.vocab_size)
    if count == own:
        return head
    initialization.say(f"the head has {own} tokens; adding {count - own} more")
    likely_V = likely_tokens(initialization.dataset.corpus, target.config.vocab_size)
    return _extended(head, count, target.model, likely_V)


def _vocabulary_size(own: int, vocabulary: int | None, limit: int) -> int:
    """Number of tokens of a head after it is extended, at most the target's `limit` tokens.

    Raises TuneError if it names more than `vocabulary` already.
    """
    count = own if vocabulary is None else min(vocabulary, limit)
    if count < own:
        raise TuneError(
            f"vocabulary is {vocabulary}, and the head to resume from has {own} tokens; give as many or "
            "more, or leave it out"
        )
    return count


def _extended(head: Head, count: int, target: OpenModel, likely_V: Tensor) -> Head:
    """The same head with `count` tokens: its own and the likeliest others.

    Its logits for its own tokens stay the same. A new token gets the mean Markov row of the rarest quarter of
    the head's own tokens. In an output layer of the head's own it gets the target's row, scaled to the norm
    of the head's rows.
    """
    is_own_V = torch.isin(likely_V, head.ids)
    own, others = likely_V[is_own_V], likely_V[~is_own_V]
    ids = torch.cat((own, others[: count - len(own)])).sort().values
    tables = Tables(head.embed_tokens.weight.detach(), target_head(target, ids.tolist()))
    more = make_head(head.config, ids.tolist(), tables)
    known, fresh = head.state_dict(), more.state_dict()
    places = torch.searchsorted(ids, head.ids)  # indices of the head's tokens among all
    rows_UD = known.pop("lm_head.weight")
    if head.config.own_head:
        table_UD = fresh["lm_head.weight"]
        table_UD *= rows_UD.norm() / table_UD[places].norm()
        table_UD[places] = rows_UD
    if (rows_UM := known.pop(_BIGRAMS, None)) is not None:
        rarest = torch.searchsorted(head.ids, own[-len(own) // 4 :])
        fresh[_BIGRAMS][:] = rows_UM[rarest].mean(dim=0)
        fresh[_BIGRAMS][places] = rows_UM
    known = {name: tensor for name, tensor in known.items() if name not in ("d2t", "t2d")}
    more.load_state_dict(known, strict=False)
    return more
