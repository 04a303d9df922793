"""A head that was exported before, as a tuning goes on from it; and more tokens for it to name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, overload

import torch
from torch import Tensor, nn

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head, target_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.vocabulary import Tables
from specinfer.hub import resolve
from specinfer.models.weights import OpenModel
from specinfer.tune.draft import Beginning
from specinfer.tune.new_head import likely_tokens

_PAIRS: Final = "markov_head.markov_w2.weight"


def known_head(
    name: str, wanted: BlockConfig | EagleConfig, target: OpenModel, scale_ND: Tensor
) -> BlockHead | EagleHead:
    """A head that was exported, to be trained on with multiplied hidden states; `name` is its folder.

    It names what it named, however many are `wanted`. One that says nothing of its guesses may learn to, and
    one of another target of these sizes may become this one's. Raises TuneError where it is of another shape
    besides, and ModelError and its kind where there is none that fits the target.
    """
    files = resolve(name)
    if not is_head(files.path):
        raise TuneError(
            f"init is {name!r}, which is no draft head; allowed: target, random, or a head's folder"
        )
    opened = HeadFolder(files, target.config)
    config = wanted = replace(wanted, draft_vocab_size=opened.config.draft_vocab_size)
    if isinstance(opened.config, BlockConfig) and opened.config.members:
        raise TuneError(
            f"the head {name} has {opened.config.members} member(s) on its trunk; a tuning goes on from a "
            "head that has none"
        )
    if isinstance(wanted, BlockConfig) and isinstance(opened.config, BlockConfig):
        silent = not opened.config.confidence
        config = replace(wanted, confidence=False, confidence_reads_token=False) if silent else wanted
    if config != opened.config:
        raise TuneError(
            f"the head {name} has another shape than the one that is wanted; give --kind, --layers, "
            "--depth, --layout and --confidence as it was trained, or leave --init out"
        )
    head = opened.module(target)
    assert isinstance(head, BlockHead | EagleHead)  # as its config is
    if config != wanted:
        assert isinstance(wanted, BlockConfig)
        known = head.state_dict()
        head = BlockHead(wanted, opened.ids)
        nn.init.zeros_(head.confidence_head.proj.weight)
        nn.init.zeros_(head.confidence_head.proj.bias)
        head.load_state_dict(known, strict=False)
    with torch.no_grad():
        head.fc.weight.div_(scale_ND.flatten())
    return head


@overload
def widened(head: BlockHead, vocabulary: int | None, beginning: Beginning) -> BlockHead: ...
@overload
def widened(head: EagleHead, vocabulary: int | None, beginning: Beginning) -> EagleHead: ...
def widened(
    head: BlockHead | EagleHead, vocabulary: int | None, beginning: Beginning
) -> BlockHead | EagleHead:
    """The head, which can name so many tokens: its own and the likeliest others; None: its own alone.

    Raises TuneError where it names more already.
    """
    target, own = beginning.target, len(head.ids)
    count = own if vocabulary is None else min(vocabulary, target.config.vocab_size)
    if count < own:
        raise TuneError(
            f"vocabulary is {vocabulary}, and the head to go on from names {own} tokens; give as many or "
            "more, or leave it out"
        )
    if count == own:
        return head
    beginning.say(f"the head named {own} tokens, and is given {count - own} more")
    likely_V = likely_tokens(beginning.lessons.corpus, target.config.vocab_size)
    return _with_more_tokens(head, count, target.model, likely_V)


def _with_more_tokens(
    head: BlockHead | EagleHead, count: int, target: OpenModel, likely_V: Tensor
) -> BlockHead | EagleHead:
    """The same head, which can name `count` tokens: its own, and of the others the likeliest.

    What it says of its own stays as it is. Of a new one the Markov term knows what it knows of the rarest
    quarter of its own; in an output layer of the head's own it is the target's row, as loud as those are.
    """
    is_own_V = torch.isin(likely_V, head.ids)
    own, others = likely_V[is_own_V], likely_V[~is_own_V]
    ids = torch.cat((own, others[: count - len(own)])).sort().values
    config = replace(head.config, draft_vocab_size=len(ids))
    tables = Tables(head.embed_tokens.weight.detach(), target_head(target, ids.tolist()))
    more: BlockHead | EagleHead
    if isinstance(config, BlockConfig):
        more = BlockHead(config, ids.tolist(), tables)
    else:
        more = EagleHead(config, ids.tolist(), tables)
    known, begun = head.state_dict(), more.state_dict()
    places = torch.searchsorted(ids, head.ids)  # of its own tokens among all
    rows_UD = known.pop("lm_head.weight")
    if config.own_head:
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
