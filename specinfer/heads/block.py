"""Block heads: `BlockHead`, a module for training and reference, and `BlockModel` for the engine.

A block head guesses a block of tokens in one pass. A block starts at an anchor, the last token of the text.
Its rows are the anchor and the mask tokens after it, at the positions of the guessed tokens. In every layer
the rows attend to projections of the target's hidden states of the text before the anchor, and to rows of
their block: the earlier ones, or all. A row starts from an embedding. With `reads_last` it starts from its
own projection of the anchor's embedding and the fused hidden state of the token before the anchor; attention
need not retrieve that state then.

In the engine the rows of all requests form one batch, and attention follows paths.

Shapes: B sequences, T rows of a text, A anchors, R rows of a block, L guessed levels. N taps, K key-value
heads, H head size, D the head's hidden size. U tokens of the draft vocabulary, V tokens of the target's, M
rank of the Markov term.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.attention.backend import Attend, Paths
from specinfer.attention.sdpa import rotated
from specinfer.heads.config import BlockConfig
from specinfer.heads.dflash2 import ConvolvedLayer, Selector
from specinfer.heads.layers import HeadLayer, HeadNorm, TokenTable, block_attended, rotation_at
from specinfer.heads.runner import HeadCache, HeadModel, HeadPass, MarkovTerm
from specinfer.heads.vocabulary import HeadVocabulary
from specinfer.kernels.attention import NativeCache
from specinfer.kernels.block_head import NativeBlockHead
from specinfer.kernels.decoder import NativeLayers
from specinfer.kernels.layout import in_huge_pages
from specinfer.kernels.product import product_args
from specinfer.kernels.structures import BlockHeadArgs
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.layers import RowNorm, rotations
from specinfer.models.shared_sums import EmbeddingTable
from specinfer.models.weight_memory import Weights
from specinfer.runtime.batch import slots_of
from specinfer.runtime.features import TappedRows, joined


class MarkovHead(nn.Module):
    """Term W2 W1[token] that the token before a guess adds to its logits."""

    def __init__(self, vocab: int, num_tokens: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = TokenTable(vocab, rank)
        self.markov_w2 = nn.Linear(rank, num_tokens, bias=False)


class BlockHead(HeadVocabulary):
    """A block head as a module whose tensors have the names of checkpoints."""

    def __init__(self, config: BlockConfig, ids: Sequence[int] | None = None) -> None:
        """See HeadVocabulary."""
        super().__init__(config, ids)
        body, rank = config.body, config.markov_rank
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, body.hidden_size, bias=False)
        self.hidden_norm = HeadNorm(body.hidden_size, body.norm_eps)
        self.layers = nn.ModuleList(HeadLayer(body) for _ in range(body.num_layers))
        self.norm = HeadNorm(body.hidden_size, body.norm_eps)
        if config.reads_last:
            self.entry_norm = HeadNorm(body.hidden_size, body.norm_eps)
            self.entry = nn.Linear(2 * body.hidden_size, config.block_size * body.hidden_size, bias=False)
        if rank:
            self.markov_head = MarkovHead(body.vocab_size, config.draft_vocab_size, rank)

    def fused(self, taps_BTND: Tensor) -> Tensor:
        """Fuse hidden states to the input of all key and value projections, [B, T, D]."""
        out: Tensor = self.hidden_norm(self.fc(taps_BTND.flatten(-2)))
        return out

    def forward(
        self, taps_BTND: Tensor, anchor_ids_BA: Tensor, anchors_BA: Tensor, rows: int | None = None
    ) -> Tensor:
        """Return the input of the output layer for every level of every block, [B, A, L, D].

        `rows` limits a causal block to its first rows, which do not depend on later ones.

        `anchors_BA` are positions in the texts. A block attends to `taps_BTND[:, :anchor]` only, so texts may
        be padded at their ends, and an anchor may be T, the token after the last row. It must be at least 1
        if the head reads the last hidden state.
        """
        config, body = self.config, self.config.body
        assert body.rope is not None
        assert rows is None or config.causal
        device, size = taps_BTND.device, rows or config.block_size
        context = self.fused(taps_BTND)
        x = self._entered(context, anchor_ids_BA, anchors_BA, size)
        places = torch.arange(context.shape[1], device=device)
        of_text = rotation_at(places, body.rope, body.head_dim)
        of_block = rotation_at(
            anchors_BA[..., None] + torch.arange(size, device=device), body.rope, body.head_dim
        )
        hidden = self._hidden(anchors_BA, len(places), size)
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            attention, given = layer.self_attn, layer.input_layernorm(x)
            found = block_attended(
                attention.queries(given, of_block),
                (attention.keys(context, of_text), attention.values(context)),
                (attention.keys(given, of_block), attention.values(given)),
                hidden,
            )
            x = layer.after_attention(x, found)
        out: Tensor = self.norm(x)
        return out if config.sample_from_anchor else out[:, :, 1:]

    def pair_logits(self, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """Return the logits that tokens `before` add to the next guesses, [..., U]; any shape.

        `entries_S` selects entries of the draft vocabulary, for a result [..., S].
        """
        known, weight = self.markov_head.markov_w1(before), self.markov_head.markov_w2.weight
        return F.linear(known, weight if entries_S is None else weight[entries_S])

    def _entered(self, context: Tensor, anchor_ids_BA: Tensor, anchors_BA: Tensor, size: int) -> Tensor:
        """Return the input of the first layer for `size` rows of each block, [B, A, R, D]."""
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
        """Return the mask of `size` rows over text and block, [B, A, R, T + R]; True is masked."""
        device = anchors_BA.device
        later = torch.arange(rows, device=device) >= anchors_BA[..., None, None]
        later = later.expand(*anchors_BA.shape, size, rows)
        block = torch.zeros(size, size, dtype=torch.bool, device=device)
        if self.config.causal:
            block = torch.ones_like(block).triu(1)
        return torch.cat((later, block.expand(*anchors_BA.shape, size, size)), dim=-1)


@dataclass(slots=True, kw_only=True)
class BlockText:
    """Input of one text: the tokens to read, and a block after them.

    Cache positions count from the start of `table`, which is at position `shift` of the text.
    """

    table: Sequence[int] = field(kw_only=False)
    shift: int = field(kw_only=False)
    begin: int  # first cache position to read
    states: Sequence[TappedRows] = ()  # the target's hidden states of the tokens to read
    count: int = 0  # tokens to read
    rows: int = 0  # rows of the block; 0: no block
    anchor: int = 0  # first token of the block
    last: Tensor | None = None  # fused state of the token before the anchor, if it is not read now


class BlockModel(HeadModel[BlockConfig, BlockText]):
    """A block head computed with the kernels; one native call computes a pass where it is available."""

    def __init__(self, head: BlockConfig, weights: Weights, target: Decoder, ids: Sequence[int]) -> None:
        """See HeadModel."""
        super().__init__(head, weights, target, ids)
        body = head.body
        self._head = weights.linear("lm_head")
        self._fc = weights.linear("fc")
        self._hidden_norm = RowNorm.of("hidden_norm", body, weights)
        if head.reads_last:
            self._entry_norm = RowNorm.of("entry_norm", body, weights)
            self._entry = weights.linear("entry")
        # The key and value projections of all layers read the same rows, so they are one product.
        of_layers = [[f"layers.{i}.self_attn.{x}_proj" for x in "kv"] for i in range(body.num_layers)]
        self._context = weights.linear(*chain(*of_layers), bias=body.qkv_bias)
        kind = ConvolvedLayer if head.conv_taps else DecoderLayer
        self._layers = [kind(i, body, weights, f"layers.{i}") for i in range(body.num_layers)]
        native: NativeLayers | None = None
        if not head.conv_taps:
            native = NativeLayers.of([layer.parts for layer in self._layers], weights.kernels.ops)
        self.selector = Selector.of(head, weights) if head.selector_rank else None
        self._norm = RowNorm.of("norm", body, weights)
        self.native: NativeBlockHead | None = None
        if native is not None and self._embedding_VD is not None:
            self.native = self._native(native, self._embedding_VD, 1.0)
        elif native is not None:
            self.native = self._native(native, *target.embedding)
        if head.markov_rank:
            before_VM = self._looked_up(weights.tensor("markov_head.markov_w1.weight"))
            named_UM = self._looked_up(weights.tensor("markov_head.markov_w2.weight"))
            product = weights.linear("markov_head.markov_w2", tied=EmbeddingTable(named_UM))
            self.markov = MarkovTerm(before_VM, named_UM, product)

    def _looked_up(self, table: Tensor) -> Tensor:
        """Copy a table that is read at random rows into huge pages, if available."""
        library = self.kernels.library
        return table if library is None else in_huge_pages(library, torch.empty_like(table)).copy_(table)

    def guess(self, texts: Sequence[BlockText], cache: HeadCache) -> HeadPass:
        """See HeadModel. Reads tokens of these texts and guesses the blocks after them.

        The state of a text is the fused state of its last token read, [D], or None if no token was read.
        """
        native, attention = self.native, cache.attention
        if native is not None and isinstance(attention, NativeCache):
            native.reach(max(text.shift + text.begin + text.count + text.rows for text in texts))
            return self._guess_at_once(native, attention, texts, cache.block_size)
        last = self._read([text for text in texts if text.count], cache)
        made = [next(last) if text.count else None for text in texts]
        blocks = [text for text in texts if text.rows]
        before = [
            text.last if new is None else new for text, new in zip(texts, made, strict=True) if text.rows
        ]
        return HeadPass(made, *self._guess_blocks(blocks, before, cache))

    def _guess_at_once(
        self, native: NativeBlockHead, cache: NativeCache, texts: Sequence[BlockText], block_size: int
    ) -> HeadPass:
        numbers: list[int] = []
        taps: list[int] = []
        tables: list[int] = []
        guesses, skipped = 0, self.head.skipped
        for text in texts:
            last = 0 if text.last is None else text.last.data_ptr()
            numbers += (len(tables), len(text.table), text.shift, text.begin, text.count, text.rows)
            numbers += (text.anchor, last)
            tables += text.table
            for part in text.states:
                taps += part.addresses()
            guesses += max(0, text.rows - skipped)
        last_ND, *guessed = native.step(numbers, taps, tables, guesses, block_size=block_size, cache=cache)
        return HeadPass([last_ND[i] if text.count else None for i, text in enumerate(texts)], *guessed)

    def _read(self, texts: Sequence[BlockText], cache: HeadCache) -> Iterator[Tensor]:
        """Write K and V of these texts' tokens; return the fused state of each text's last token, [D]."""
        if not texts:
            return iter(())
        spans = [range(text.begin, text.begin + text.count) for text in texts]
        positions = [p + text.shift for text, span in zip(texts, spans, strict=True) for p in span]
        slots = [
            slot
            for text, span in zip(texts, spans, strict=True)
            for slot in slots_of(text.table, span, cache.block_size)
        ]
        fused_TD = self.fused(joined([part for text in texts for part in text.states]))
        keys, values = self.context(fused_TD, torch.tensor(positions, device=self.device))
        where = torch.tensor(slots, device=self.device)
        for layer, (k_TKH, v_TKH) in enumerate(zip(keys, values, strict=True)):
            cache.kv.keys[layer][where] = k_TKH
            cache.kv.values[layer][where] = v_TKH
        return iter([fused_TD[end - 1] for end in accumulate(text.count for text in texts)])

    def _guess_blocks(
        self, texts: Sequence[BlockText], last: Sequence[Tensor | None], cache: HeadCache
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the output layer and the logits for the rows with a guess."""
        head = self.head
        if not texts:
            return torch.empty(0, self.config.hidden_size), torch.empty(0, len(self.ids))
        positions: list[int] = []
        chosen: list[int] = []
        for text in texts:
            first = text.shift + text.begin + text.count
            chosen += range(len(positions) + head.skipped, len(positions) + text.rows)
            positions += range(first, first + text.rows)
        attend = cache.attention.bind(_block_paths(texts, cache.block_size, causal=head.causal))
        positions_T = torch.tensor(positions, device=self.device)
        if head.reads_last:
            anchors = [text.anchor for text in texts]
            firsts = [text.shift + text.begin + text.count for text in texts]
            anchors_BD = self.embedded(*torch.tensor([anchors, firsts], device=self.device))
            entered_BRD = self.entered(torch.stack([one for one in last if one is not None]), anchors_BD)
            blocks = zip(texts, entered_BRD, strict=True)
            begun_TD = torch.cat([rows_RD[: text.rows] for text, rows_RD in blocks])
        else:
            ids = [
                token for text in texts for token in (text.anchor, *[head.mask_token_id] * (text.rows - 1))
            ]
            begun_TD = self.embedded(torch.tensor(ids, device=self.device), positions_T)
        places_T = torch.tensor([row for text in texts for row in range(text.rows)], device=self.device)
        read_TD = self.run(begun_TD, positions_T, places_T, attend)
        read_RD = read_TD.index_select(0, torch.tensor(chosen, device=self.device))
        return read_RD, self.logits(read_RD)

    def probe(self, rows: int, block_size: int) -> list[BlockText]:
        """See HeadModel. Each text reads two tokens and has one block.

        The number of blocks dominates the cost of a step: reading more tokens adds little.
        """
        # All texts use the same slots, because the cache may be small; the time is the same.
        table = range(-(-(2 + self.head.block_size) // block_size))
        states = self.zero_states(2)
        text = BlockText(table, 0, begin=0, states=states, count=2, rows=self.head.block_size)
        return [text] * -(-rows // 2)

    def _native(self, layers: NativeLayers, embedding_VD: Tensor, scale: float) -> NativeBlockHead:
        """Return the head's native calls; its parts are native."""
        head = self.head
        kept = [embedding_VD, self._fc, self._context, self._head, self._hidden_norm.parts, self._norm.parts]
        args = BlockHeadArgs(
            fc=product_args(self._fc),
            context=product_args(self._context),
            output=product_args(self._head),
            hidden_norm=self._hidden_norm.parts.args,
            norm=self._norm.parts.args,
            scale=scale,
            causal=head.causal,
            skipped=head.skipped,
            embedding=embedding_VD.data_ptr(),
            tokens=len(embedding_VD),
            mask=head.mask_token_id,
        )
        if head.reads_last:
            args.entry, args.entry_norm = product_args(self._entry), self._entry_norm.parts.args
            kept += [self._entry, self._entry_norm.parts]
        make = partial(rotations, self._ropes, self.config.max_context)
        return NativeBlockHead(args, kept, layers, make, self.dtype)

    def fused(self, taps_TND: Tensor) -> Tensor:
        """Fuse the target's hidden states, [T, D]."""
        return self._hidden_norm(self._fc(taps_TND.flatten(1)))

    def context(self, fused_TD: Tensor, positions_T: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values of a text's rows: for every layer [T, K, H] each."""
        kv_heads, size = self.config.num_kv_heads, self.config.head_dim
        made = self._context(fused_TD).view(len(fused_TD), len(self._layers), 2, kv_heads, size)
        rope = self._ropes[0].at(positions_T)
        heads = [layer.heads for layer in self._layers]
        keys = [rotated(made[:, i, 0], one.k_norm, one.norm_eps, rope) for i, one in enumerate(heads)]
        return keys, [made[:, i, 1] for i in range(len(heads))]

    def entered(self, last_PD: Tensor, anchors_PD: Tensor) -> Tensor:
        """Return the input of the first layer for P blocks, [P, R, D], of a head with `reads_last`.

        `last_PD` are fused states of the tokens before the anchors, `anchors_PD` the anchors' embeddings.
        """
        read = torch.cat((last_PD, self._entry_norm(anchors_PD)), dim=-1)
        return self._entry(read).view(len(last_PD), self.head.block_size, -1)

    def run(self, x_TD: Tensor, positions_T: Tensor, places_T: Tensor, attend: Attend) -> Tensor:
        """Return the input of the output layer for each row of the blocks, [T, D]; writes their K and V.

        `x_TD` is the input of the first layer and may be overwritten. Rows have `places_T` in their blocks.
        """
        rope = self._ropes[0].at(positions_T)
        y_TD: Tensor | None = None
        for layer in self._layers:
            if isinstance(layer, ConvolvedLayer):
                y_TD = layer.of_block(x_TD, y_TD, rope, attend, places_T)
            else:
                y_TD = layer(x_TD, y_TD, rope, attend)
        return self._norm(x_TD, y_TD)

    def logits(self, h_RD: Tensor) -> Tensor:
        """See HeadModel."""
        return self._head(h_RD)


def _block_paths(texts: Sequence[BlockText], block_size: int, *, causal: bool) -> Paths:
    """Return the attention paths of blocks' rows: the text, and the earlier rows or all rows of the block."""
    requests: list[int] = []
    shared: list[int] = []
    num_blocks = 0
    for text in texts:
        first, begin = len(shared), text.begin + text.count
        shared += [begin + (row + 1 if causal else text.rows) for row in range(text.rows)]
        requests += (first, len(shared), num_blocks, begin + text.rows)
        num_blocks += len(text.table)
    tail_ends = [0] * (len(shared) + 1)
    tables = [text.table for text in texts]
    return Paths.of(requests, shared, tail_ends, [], tables=tables, block_size=block_size)
