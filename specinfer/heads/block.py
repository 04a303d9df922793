"""A head that guesses a block in one pass, in plain PyTorch: for training, and the oracle of the engine's.

A block hangs from an anchor, a token of the text: its rows are the anchor and mask tokens behind it, at the
positions of the tokens they stand for. In every layer they see keys and values made of the target's hidden
states of the text before the anchor, and of the block's own rows: those up to their own, or all. Rows begin
as embeddings; or, with `reads_last`, each as a product of its own with the anchor's embedding and what was
made of the hidden states of the token before the anchor, which has not to be found by attention then.

Shapes: B sequences, T rows of a text, A anchors, R rows of a block, L levels guessed, N taps, D the head's
hidden size, U tokens it can name, M rank of the Markov term.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.heads.config import BlockConfig
from specinfer.heads.layers import HeadLayer, Norm, rotations, softmax
from specinfer.heads.vocabulary import HeadVocabulary, Tables


class MarkovHead(nn.Module):
    """What the token before adds to the logits of a guess: W2 W1[token]."""

    def __init__(self, vocab: int, named: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, named, bias=False)


class BlockHead(HeadVocabulary):
    """The head as a module whose tensors have the names of checkpoints."""

    def __init__(
        self, config: BlockConfig, ids: Sequence[int] | None = None, tables: Tables | None = None
    ) -> None:
        """As HeadVocabulary."""
        super().__init__(config, ids, tables)
        body, rank = config.body, config.markov_rank
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, body.hidden_size, bias=False)
        self.hidden_norm = Norm(body.hidden_size, body.norm_eps)
        self.layers = nn.ModuleList(HeadLayer(body) for _ in range(body.num_layers))
        self.norm = Norm(body.hidden_size, body.norm_eps)
        if config.reads_last:
            self.entry_norm = Norm(body.hidden_size, body.norm_eps)
            self.entry = nn.Linear(2 * body.hidden_size, config.block_size * body.hidden_size, bias=False)
        if rank:
            self.markov_head = MarkovHead(body.vocab_size, config.draft_vocab_size, rank)

    def fused(self, taps_BTND: Tensor) -> Tensor:
        """What all layers make keys and values of, [B, T, D]."""
        out: Tensor = self.hidden_norm(self.fc(taps_BTND.flatten(-2)))
        return out

    def forward(
        self, taps_BTND: Tensor, anchor_ids_BA: Tensor, anchors_BA: Tensor, rows: int | None = None
    ) -> Tensor:
        """What the output layer reads of every level of every block, [B, A, L, D].

        With `rows` those of a causal block's first rows alone, which do not depend on the others.

        `anchors_BA` are places in the texts: a block sees `taps_BTND[:, :anchor]` alone, so texts may be
        padded behind their ends, and an anchor may be T, the token behind the last row. It is 1 or more where
        the head reads the last hidden state.
        """
        config, body = self.config, self.config.body
        assert body.rope is not None
        assert rows is None or config.causal
        device, size = taps_BTND.device, rows or config.block_size
        context = self.fused(taps_BTND)
        x = self._entered(context, anchor_ids_BA, anchors_BA, size)
        places = torch.arange(context.shape[1], device=device)
        of_text = rotations(places, body.rope, body.head_dim)
        of_block = rotations(
            anchors_BA[..., None] + torch.arange(size, device=device), body.rope, body.head_dim
        )
        hidden = self._hidden(anchors_BA, len(places), size)
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            attention, given = layer.self_attn, layer.input_layernorm(x)
            found = _attended(
                attention.queries(given, of_block),
                (attention.keys(context, of_text), attention.values(context)),
                (attention.keys(given, of_block), attention.values(given)),
                hidden,
            )
            x = layer.after_attention(x, found)
        out: Tensor = self.norm(x)
        return out if config.sample_from_anchor else out[:, :, 1:]

    def before(self, tokens: Tensor) -> Tensor:
        """What guesses behind these tokens know of them, [..., M]; any shape."""
        out: Tensor = self.markov_head.markov_w1(tokens)
        return out

    def pair_logits(self, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """What tokens `before` add to the logits of guesses behind them, [..., U]; any shape.

        With `entries_S` of these entries of its tokens alone, [..., S].
        """
        known, weight = self.before(before), self.markov_head.markov_w2.weight
        return F.linear(known, weight if entries_S is None else weight[entries_S])

    def _entered(self, context: Tensor, anchor_ids_BA: Tensor, anchors_BA: Tensor, size: int) -> Tensor:
        """What `size` rows of blocks begin with, [B, A, R, D]."""
        config, width = self.config, self.config.body.hidden_size
        if not config.reads_last:
            ids = torch.full((*anchor_ids_BA.shape, size), config.mask_token_id, device=context.device)
            ids[..., 0] = anchor_ids_BA
            embedded: Tensor = self.embed_tokens(ids)
            return embedded
        last = context.gather(1, (anchors_BA - 1)[..., None].expand(-1, -1, width))
        read = torch.cat((last, self.entry_norm(self.embed_tokens(anchor_ids_BA))), dim=-1)
        entered = F.linear(read, self.entry.weight[: size * width])
        return entered.view(*anchor_ids_BA.shape, size, width).to(context.dtype)

    def _hidden(self, anchors_BA: Tensor, rows: int, size: int) -> Tensor:
        """What `size` rows of blocks do not see, of the text and of their block: bool [B, A, R, T + R]."""
        device = anchors_BA.device
        later = torch.arange(rows, device=device) >= anchors_BA[..., None, None]
        later = later.expand(*anchors_BA.shape, size, rows)
        block = torch.zeros(size, size, dtype=torch.bool, device=device)
        if self.config.causal:
            block = torch.ones_like(block).triu(1)
        return torch.cat((later, block.expand(*anchors_BA.shape, size, size)), dim=-1)


def _attended(
    q_BARKGH: Tensor, of_text: tuple[Tensor, Tensor], of_block: tuple[Tensor, Tensor], hidden_BARX: Tensor
) -> Tensor:
    """What the block's rows find, [B, A, R, K, G, H], where keys and values are [B, T, K, H] and
    [B, A, R, K, H].
    """
    scores = torch.cat(
        (
            torch.einsum("barkgh,btkh->barkgt", q_BARKGH, of_text[0]),
            torch.einsum("barkgh,baskh->barkgs", q_BARKGH, of_block[0]),
        ),
        dim=-1,
    )
    weights = softmax(scores.masked_fill(hidden_BARX[:, :, :, None, None], float("-inf")))
    text, block = torch.split(weights, [of_text[0].shape[1], of_block[0].shape[2]], dim=-1)
    return torch.einsum("barkgt,btkh->barkgh", text, of_text[1]) + torch.einsum(
        "barkgs,baskh->barkgh", block, of_block[1]
    )
