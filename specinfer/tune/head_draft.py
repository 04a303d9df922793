"""Heads as drafts that learn: what each kind guesses along known texts, and exported heads to go on from.

Guesses are made behind the true tokens, at anchors of the texts (dataset.py). A block head computes the rows
of its blocks. An EAGLE head computes every row of the text, and each of its steps with what the step before
put out, as it does when it guesses: a chain of its own hidden states, over tokens that came.

Shapes: B texts, A anchors a text, L levels, N taps, D the head's hidden size, U tokens it can name.
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
from specinfer.models.weights import OpenModel
from specinfer.tune.dataset import BlockBatch
from specinfer.tune.draft import Beginning, Description, Target, TrainableDraft
from specinfer.tune.initial_head import Head, head_of, likely_tokens

USUAL_ANCHORS: Final = 64  # of a text that a step of a block head computes, at most
_PAIRS: Final = "markov_head.markov_w2.weight"


class HeadDraft(TrainableDraft):
    """A head, and what the hidden states that it reads are multiplied by."""

    head: Head

    def __init__(self, head: Head, scale_ND: Tensor) -> None:
        self.module = self.head = head
        self.scale_ND = scale_ND
        self.ids = head.ids
        self.vocab = head.config.body.vocab_size
        self.depth = self.learnt_depth = head.config.depth
        self.last_norm = head.norm

    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """The output layer's."""
        if entries_S is None:
            return self.head.logits(h)
        return h @ self.head.lm_head.weight[entries_S].T

    def folded(self) -> Head:
        """A copy of the head that reads hidden states as the target leaves them."""
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

    def _described(self, tag: str, kind: str, does: str, *, ours: bool) -> Description:
        config = self.head.config
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

    head: BlockHead
    one_pass = True

    def __init__(self, head: BlockHead, scale_ND: Tensor, anchors: int = USUAL_ANCHORS) -> None:
        """`anchors` of a text a step computes, at most."""
        super().__init__(head, scale_ND)
        self.anchors = anchors

    def guessed(self, batch: BlockBatch, levels: int) -> Tensor:
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

    def described(self) -> Description:
        """What a card says of it."""
        config = self.head.config
        does = f"guesses {config.depth} tokens in one pass"
        return self._described("dspark", "causal block head", does, ours=config.reads_last)


class EagleHeadDraft(HeadDraft):
    """An EAGLE head: all places of a text are computed in a step."""

    head: EagleHead

    def __init__(self, head: EagleHead, scale_ND: Tensor) -> None:
        super().__init__(head, scale_ND)
        self.one_pass = head.config.mask_token_id is not None  # P-EAGLE's

    def guessed(self, batch: BlockBatch, levels: int) -> Tensor:
        """Each row's steps, of which anchors are chosen."""
        rows = batch.taps_BTND.shape[1]
        # Row t is of token t + 1, and its step s of the token s behind that.
        ids_BTS = batch.tokens_BT[:, 1:].unfold(1, levels, 1)[:, :rows]
        read_BTSD: Tensor = self.head(ids_BTS, batch.taps_BTND)
        at_BA11 = (batch.anchors_BA - 1)[..., None, None]
        return read_BTSD.gather(1, at_BA11.expand(-1, -1, *read_BTSD.shape[2:]))

    def described(self) -> Description:
        """What a card says of it."""
        return self._described("eagle3", "EAGLE-3 head", "guesses a level of a tree in each pass", ours=False)


def draft_of(head: Head, scale_ND: Tensor, anchors: int = USUAL_ANCHORS) -> BlockHeadDraft | EagleHeadDraft:
    """A head as a draft; of a text a step computes so many `anchors` of a block head, at most."""
    if isinstance(head, BlockHead):
        return BlockHeadDraft(head, scale_ND, anchors)
    return EagleHeadDraft(head, scale_ND)


def known_folder(
    name: str, wanted: BlockConfig | EagleConfig, vocabulary: int | None, target: ModelConfig
) -> HeadFolder:
    """A head that was exported, which can be trained on; `name` is its folder. Reads no weights.

    It names what it named, however many are `wanted`. One of another target of these sizes may become this
    one's. Raises TuneError where it is of another shape besides, or names more than `vocabulary` tokens, and
    ModelError and its kind where there is none that fits the target.
    """
    files = resolve(name)
    if not is_head(files.path):
        raise TuneError(
            f"init is {name!r}, which is no draft head; allowed: target, random, or a head's folder"
        )
    opened = HeadFolder(files, target)
    if opened.config != replace(wanted, draft_vocab_size=opened.config.draft_vocab_size):
        raise TuneError(
            f"the head {name} has another shape than the one that is wanted; give --kind, --layers, "
            "--depth and --layout as it was trained, or leave --init out"
        )
    _named(len(opened.ids), vocabulary, target.vocab_size)
    return opened


def known_head(name: str, wanted: BlockConfig | EagleConfig, target: OpenModel, scale_ND: Tensor) -> Head:
    """The head in `known_folder`, to be trained on with multiplied hidden states; raises as that."""
    opened = known_folder(name, wanted, None, target.config)
    head = opened.module(target)
    assert isinstance(head, BlockHead | EagleHead)  # as its config is
    with torch.no_grad():
        head.fc.weight.div_(scale_ND.flatten())
    return head


def widened(head: Head, vocabulary: int | None, beginning: Beginning) -> Head:
    """The head, which can name so many tokens: its own and the likeliest others; None: its own alone.

    Raises TuneError where it names more already.
    """
    target, own = beginning.target, len(head.ids)
    count = _named(own, vocabulary, target.config.vocab_size)
    if count == own:
        return head
    beginning.say(f"the head named {own} tokens, and is given {count - own} more")
    likely_V = likely_tokens(beginning.dataset.corpus, target.config.vocab_size)
    return _with_more_tokens(head, count, target.model, likely_V)


def _named(own: int, vocabulary: int | None, most: int) -> int:
    """How many tokens a head will name that names so many of its own, of a target that has so many at most.

    Raises TuneError where it names more already.
    """
    count = own if vocabulary is None else min(vocabulary, most)
    if count < own:
        raise TuneError(
            f"vocabulary is {vocabulary}, and the head to go on from names {own} tokens; give as many or "
            "more, or leave it out"
        )
    return count


def _with_more_tokens(head: Head, count: int, target: OpenModel, likely_V: Tensor) -> Head:
    """The same head, which can name `count` tokens: its own, and of the others the likeliest.

    What it says of its own stays as it is. Of a new one the Markov term knows what it knows of the rarest
    quarter of its own; in an output layer of the head's own it is the target's row, as loud as those are.
    """
    is_own_V = torch.isin(likely_V, head.ids)
    own, others = likely_V[is_own_V], likely_V[~is_own_V]
    ids = torch.cat((own, others[: count - len(own)])).sort().values
    tables = Tables(head.embed_tokens.weight.detach(), target_head(target, ids.tolist()))
    more = head_of(head.config, ids.tolist(), tables)
    known, begun = head.state_dict(), more.state_dict()
    places = torch.searchsorted(ids, head.ids)  # of its own tokens among all
    rows_UD = known.pop("lm_head.weight")
    if head.config.own_head:
        table_UD = begun["lm_head.weight"]
        table_UD *= rows_UD.norm() / table_UD[places].norm()
        table_UD[places] = rows_UD
    if (rows_UM := known.pop(_PAIRS, None)) is not None:
        rarest = torch.searchsorted(head.ids, own[-len(own) // 4 :])
        begun[_PAIRS][:] = rows_UM[rarest].mean(dim=0)
        begun[_PAIRS][places] = rows_UM
    known = {name: tensor for name, tensor in known.items() if name not in ("d2t", "t2d")}
    more.load_state_dict(known, strict=False)
    return more
