"""A head that was exported before, as a tuning goes on from it; and more tokens for it to name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, overload

import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head, target_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.vocabulary import Tables
from specinfer.hub import resolve
from specinfer.models.config import ModelConfig
from specinfer.models.weights import OpenModel
from specinfer.tune.draft import Beginning
from specinfer.tune.new_head import likely_tokens

_PAIRS: Final = "markov_head.markov_w2.weight"


def known_folder(
    name: str, wanted: BlockConfig | EagleConfig, vocabulary: int | None, target: ModelConfig
) -> HeadFolder:
    """A head that was exported, which can be trained on; `name` is its folder. Reads no weights.

    It names what it named, however many are `wanted`. One of another target of these sizes may become this
    one's. Raises TuneError where it is of another shape
    besides, or names more than `vocabulary` tokens, and ModelError and its kind where there is none that fits
    the target.
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


def known_head(
    name: str, wanted: BlockConfig | EagleConfig, target: OpenModel, scale_ND: Tensor
) -> BlockHead | EagleHead:
    """The head in `known_folder`, to be trained on with multiplied hidden states; raises as that."""
    opened = known_folder(name, wanted, None, target.config)
    head = opened.module(target)
    assert isinstance(head, BlockHead | EagleHead)  # as its config is
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
    count = _named(own, vocabulary, target.config.vocab_size)
    if count == own:
        return head
    beginning.say(f"the head named {own} tokens, and is given {count - own} more")
    likely_V = likely_tokens(beginning.lessons.corpus, target.config.vocab_size)
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
