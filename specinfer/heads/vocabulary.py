"""Draft vocabularies in modules and files, and the tables that a head shares with its target."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.config import HeadConfig, LayersConfig
from specinfer.heads.layers import TokenTable
from specinfer.models.quantized.pieces import TensorEntry


class HeadVocabulary(nn.Module):
    """Base module of heads: embeddings, output layer and draft vocabulary.

    The embeddings and the output layer are trained if they belong to the head. `d2t` and `t2d` are as in
    checkpoints: the offset from a draft id to the target's id, and a mask of target ids that have a draft id.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LayersConfig, ids: Sequence[int] | None) -> None:
        """`ids` is the draft vocabulary, ascending; None: all tokens.

        Raises ModelError if their number differs from the config's.
        """
        super().__init__()
        size, body = config.draft_vocab_size, config.body
        self.embed_tokens = TokenTable(body.vocab_size, body.hidden_size)
        self.lm_head = nn.Linear(body.hidden_size, size, bias=False)
        self.embed_tokens.weight.requires_grad_(config.own_embedding)
        self.lm_head.weight.requires_grad_(config.own_head)
        offsets, kept = id_maps(range(body.vocab_size) if ids is None else ids, body.vocab_size)
        if len(offsets) != size:
            raise ModelError(f"a head has {len(offsets)} token ids; expected its draft_vocab_size, {size}")
        if size < body.vocab_size:
            self.register_buffer("d2t", offsets)
            self.register_buffer("t2d", kept)
        self._all = size == body.vocab_size

    @property
    def ids(self) -> Tensor:
        """The draft vocabulary, ascending, int64."""
        count = self.lm_head.weight.shape[0]
        return torch.arange(count) if self._all else torch.arange(count) + self.d2t.cpu()

    def logits(self, h: Tensor) -> Tensor:
        """Return logits over the draft vocabulary [..., U] for input rows of the output layer [..., D]."""
        logits: Tensor = self.lm_head(h)
        return logits


def id_maps(ids: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """Return d2t [U] and t2d [vocab] of a draft vocabulary.

    Raises ModelError unless the ids ascend and are in the vocabulary.
    """
    # Always on the CPU: heads are also built on the meta device, where values cannot be checked.
    named = torch.tensor(ids, dtype=torch.int64, device="cpu")
    if (
        named.dim() != 1
        or not len(named)
        or int(named.min()) < 0
        or int(named.max()) >= vocab
        or not bool((named.diff() > 0).all())
    ):
        raise ModelError(
            f"the draft vocabulary of a head must be different ids from 0 to {vocab - 1} in ascending order"
        )
    kept = torch.zeros(vocab, dtype=torch.bool, device="cpu")
    kept[named] = True
    return named - torch.arange(len(named), device="cpu"), kept


def own_tensors(head: nn.Module) -> dict[str, Tensor]:
    """Return a head's own tensors: without tables of its target and without id maps.

    The module has a `config`.
    """
    config = cast("HeadConfig", head.config)
    others = {"d2t", "t2d"}
    if not config.own_embedding:
        others.add("embed_tokens.weight")
    if not config.own_head:
        others.add("lm_head.weight")
    return {name: tensor for name, tensor in head.state_dict().items() if name not in others}


Entries = Mapping[str, TensorEntry]


def read_vocabulary(path: Path, config: HeadConfig, entries: Entries) -> Sequence[int]:
    """Return the draft vocabulary from d2t, checked against t2d if present."""
    named, vocab = config.draft_vocab_size, config.body.vocab_size
    if "d2t" not in entries:
        if named == vocab:
            return range(vocab)
        raise ModelFileError(f"{path} has a draft vocabulary of {named} of {vocab} tokens but lacks 'd2t'")
    offsets = read_whole(path, entries, "d2t", named)
    if offsets.is_floating_point() or offsets.dtype in (torch.bool, torch.uint8):
        raise ModelFileError(f"{path}: tensor 'd2t' is of {offsets.dtype}; expected whole numbers")
    ids = (offsets.to(torch.int64) + torch.arange(named)).tolist()
    try:
        _, kept = id_maps(ids, vocab)
    except ModelError as error:
        raise ModelFileError(f"{path}: tensor 'd2t' is damaged: {error}") from error
    if "t2d" in entries and not torch.equal(read_whole(path, entries, "t2d", vocab).to(torch.bool), kept):
        raise ModelFileError(
            f"{path}: tensors 'd2t' and 't2d' name different tokens; download the head again"
        )
    return [int(i) for i in ids]


def read_whole(path: Path, entries: Entries, name: str, length: int) -> Tensor:
    """Return a tensor of one dimension; raises ModelFileError if it has another length."""
    entry = entries[name]
    if entry.shape != (length,):
        raise ModelFileError(f"{path}: tensor {name!r} has shape {list(entry.shape)}, expected [{length}]")
    return entry.read_rows(0, length)
