"""The tokens a head can name, and the target's tables that it uses: what modules and checkpoints share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError
from specinfer.heads.config import BlockConfig, EagleConfig


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Embeddings and output layer that a head starts with: of its target, or its own."""

    embedding_VD: Tensor  # of all tokens
    head_UD: Tensor  # of the tokens the head can name, in the order of its ids


class Vocabulary(nn.Module):
    """The part of a head between its layers and tokens; modules of heads are derived from it.

    Embeddings and output layer are trained where they are the head's own. `d2t` and `t2d` are as checkpoints
    have them: what to add to a draft's id to make it the target's, and which of the target's have one.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: EagleConfig | BlockConfig, ids: Sequence[int] | None, tables: Tables | None
    ) -> None:
        """`ids` are the tokens it can name, ascending; None: all. `tables` None: random ones.

        Raises ModelError where ids or tables are not of the config's sizes.
        """
        super().__init__()
        size, body = config.draft_vocab_size, config.body
        self.embed_tokens = nn.Embedding(body.vocab_size, body.hidden_size)
        self.lm_head = nn.Linear(body.hidden_size, size, bias=False)
        self.embed_tokens.weight.requires_grad_(config.own_embedding)
        self.lm_head.weight.requires_grad_(config.own_head)
        if tables is not None:
            for name, module, table in (
                ("embeddings", self.embed_tokens, tables.embedding_VD),
                ("output layer", self.lm_head, tables.head_UD),
            ):
                if table.shape != module.weight.shape:
                    raise ModelError(
                        f"a head's {name} are {list(table.shape)}; expected {list(module.weight.shape)}"
                    )
                with torch.no_grad():
                    module.weight.copy_(table)
        offsets, kept = id_maps(range(body.vocab_size) if ids is None else ids, body.vocab_size)
        if len(offsets) != size:
            raise ModelError(f"a head can name {len(offsets)} tokens; its draft_vocab_size is {size}")
        if size < body.vocab_size:
            self.register_buffer("d2t", offsets)
            self.register_buffer("t2d", kept)
        self._all = size == body.vocab_size

    @property
    def ids(self) -> Tensor:
        """The tokens it can name, ascending, int64."""
        count = self.lm_head.weight.shape[0]
        return torch.arange(count) if self._all else torch.arange(count) + self.d2t.cpu()

    def logits(self, h: Tensor) -> Tensor:
        """The logits of the tokens it can name, [..., U], of rows the output layer reads, [..., D]."""
        logits: Tensor = self.lm_head(h)
        return logits


def id_maps(ids: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """d2t [U] and t2d [vocab] of the tokens a head can name.

    Raises ModelError unless they ascend and are of the vocabulary.
    """
    named = torch.tensor(ids, dtype=torch.int64)
    if (
        named.dim() != 1
        or not len(named)
        or int(named.min()) < 0
        or int(named.max()) >= vocab
        or not bool((named.diff() > 0).all())
    ):
        raise ModelError(
            f"the tokens a head can name are not different ids from 0 to {vocab - 1} in ascending order"
        )
    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[named] = True
    return named - torch.arange(len(named)), kept
