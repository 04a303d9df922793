"""A block head as the engine runs it: rows of all requests, attention along paths.

heads/block.py says what it computes. Shapes: T rows, N taps, L layers, K key-value heads, H head size, D the
head's hidden size, U tokens it can name, V tokens it reads, M rank of the Markov term, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.attention.native import NativeAttend
from specinfer.attention.sdpa import rotated
from specinfer.heads.config import BlockConfig
from specinfer.kernels.block_head import BlockHeadParts, NativeBlockHead
from specinfer.kernels.layers import NativeLayers
from specinfer.kernels.product import in_huge_pages
from specinfer.models.config import Activation
from specinfer.models.decoder import Decoder, DecoderLayer
from specinfer.models.language_model import LanguageModel
from specinfer.models.layers import RMSNorm
from specinfer.models.rope import RotaryEmbedding, rotations
from specinfer.models.weight_memory import Weights


class BlockModel:
    """The head over products and attention of the kernels; it knows neither requests nor caches."""

    def __init__(
        self, head: BlockConfig, weights: Weights, target: LanguageModel, ids: Sequence[int]
    ) -> None:
        """`target` embeds tokens where the head has no embeddings; the head can name the tokens `ids`."""
        self.head = head
        self.config = body = head.body
        self.ids = ids
        self.dtype = weights.dtype
        self.device = weights.device
        self.kernels = weights.kernels
        assert body.rope is not None
        ops, eps = weights.kernels.ops, body.norm_eps
        self._target = target
        self._embedding_VD = weights.tensor("embed_tokens.weight") if head.own_embedding else None
        self._head = weights.linear("lm_head")
        self._fc = weights.linear("fc")
        self._hidden_norm = RMSNorm(weights.tensor("hidden_norm.weight"), eps, ops)
        if head.reads_last:
            self._entry_norm = RMSNorm(weights.tensor("entry_norm.weight"), eps, ops)
            self._entry = weights.linear("entry")
        # Keys and values of a text are products of all layers with the same rows: one product makes them.
        of_layers = [[f"layers.{i}.self_attn.{x}_proj" for x in "kv"] for i in range(body.num_layers)]
        self._context = weights.linear(*chain(*of_layers), bias=body.qkv_bias)
        self._layers = [DecoderLayer(i, body, weights, f"layers.{i}") for i in range(body.num_layers)]
        self._at_once = None
        if body.activation is not Activation.RELU:
            self._at_once = NativeLayers.of(
                [layer.parts() for layer in self._layers], ops, gelu=body.activation is Activation.GELU_TANH
            )
        self._norm = RMSNorm(weights.tensor("norm.weight"), eps, ops)
        self._rope = RotaryEmbedding(body.rope, body.head_dim, self.device)
        self._native: NativeBlockHead | None = None
        if self._embedding_VD is not None:
            self._native = NativeBlockHead.of(self._parts(self._embedding_VD, 1.0), self._at_once, ops)
        elif isinstance(target, Decoder):
            self._native = NativeBlockHead.of(self._parts(*target.embedding), self._at_once, ops)
        self.markov_VM: Tensor | None = None  # W1: a row for each token before
        self.markov_UM: Tensor | None = None  # W2: a row for each token it can name
        if head.markov_rank:
            self.markov_VM = self._looked_up(weights.tensor("markov_head.markov_w1.weight"))
            self.markov_UM = self._looked_up(weights.tensor("markov_head.markov_w2.weight"))
            self.markov = weights.linear("markov_head.markov_w2", loaded=self.markov_UM)
        self.confidence_1W: Tensor | None = None  # float32
        if head.confidence:
            self.confidence_1W = weights.tensor("confidence_head.proj.weight").float()
            self.confidence_bias = float(weights.tensor("confidence_head.proj.bias"))

    def _looked_up(self, table: Tensor) -> Tensor:
        """A table whose rows are looked up here and there: in large pages where the system has some."""
        library = self.kernels.library
        return table if library is None else in_huge_pages(library, torch.empty_like(table)).copy_(table)

    def native(self, positions: int) -> NativeBlockHead | None:
        """The same in native calls, if it can be, with rotations of so many positions at the least."""
        if self._native is not None:
            self._native.reach(positions)
        return self._native

    def _parts(self, embedding_VD: Tensor, scale: float) -> BlockHeadParts:
        """What native calls compute with."""
        head = self.head
        return BlockHeadParts(
            fc=self._fc,
            hidden_norm_D=self._hidden_norm.weight_D,
            context=self._context,
            entry=self._entry if head.reads_last else None,
            entry_norm_D=self._entry_norm.weight_D if head.reads_last else None,
            layers=[layer.parts() for layer in self._layers],
            norm_D=self._norm.weight_D,
            output=self._head,
            embedding_VD=embedding_VD,
            embedding_scale=scale,
            mask_token_id=head.mask_token_id,
            causal=head.causal,
            skipped=head.skipped,
            rotations=partial(rotations, [self._rope], self.config.max_context),
        )

    def fused(self, taps_TND: Tensor) -> Tensor:
        """What the head makes of the target's hidden states, [T, D]."""
        return self._hidden_norm(self._fc(taps_TND.flatten(1)))

    def context(self, fused_TD: Tensor, positions_T: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and values of a text's rows, each [T, K, H] of every layer."""
        kv_heads, size = self.config.num_kv_heads, self.config.head_dim
        made = self._context(fused_TD).view(len(fused_TD), len(self._layers), 2, kv_heads, size)
        rope = self._rope.at(positions_T)
        keys = []
        for i, layer in enumerate(self._layers):
            heads = layer.heads
            keys.append(rotated(made[:, i, 0], heads.k_norm_H, heads.norm_eps, rope))
        return keys, [made[:, i, 1] for i in range(len(self._layers))]

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """The tokens' embeddings, [T, D]."""
        if self._embedding_VD is None:
            return self._target.embed(token_ids_T, positions_T).summed()
        return self.kernels.ops.embed(token_ids_T, self._embedding_VD, 1.0)

    def entered(self, last_PD: Tensor, anchors_PD: Tensor) -> Tensor:
        """What all rows of P blocks begin with, [P, R, D], of a head that reads the last hidden state.

        `last_PD` is what `fused` made of the token before each anchor, `anchors_PD` the anchors' embeddings.
        """
        read = torch.cat((last_PD, self._entry_norm(anchors_PD)), dim=-1)
        return self._entry(read).view(len(last_PD), self.head.block_size, -1)

    def run(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """What the output layer reads of each row of the blocks, [T, D]; writes their K and V.

        `x_TD` is what they begin with; it is used up.
        """
        rope = self._rope.at(positions_T)
        y_TD: Tensor | None = None
        if self._at_once is not None and isinstance(attend, NativeAttend):
            y_TD, _ = self._at_once(x_TD, None, rope, rope, attend, range(len(self._layers)))
        else:
            for layer in self._layers:
                y_TD = layer(x_TD, y_TD, rope, attend)
        return self._norm(x_TD, y_TD)

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of the tokens it can name, the token before left out of account, [R, U]."""
        return self._head(h_RD)

    def before(self, token_ids: Sequence[int]) -> Tensor:
        """What guesses behind these tokens know of them, float32 [R, M]."""
        assert self.markov_VM is not None
        ids = torch.tensor(token_ids, device=self.device)
        return self.markov_VM.index_select(0, ids).float()

    def pair_logits(self, before_RM: Tensor) -> Tensor:
        """What is known of the tokens before, float32 [R, M], as logits to add, float32 [R, U].

        A product like the others: quantized where they are.
        """
        return self.markov(before_RM.to(self.dtype)).float()

    def confidence(self, h_RD: Tensor, before_RM: Tensor | None) -> Tensor:
        """How likely the head's guess at each row is right, float32 [R]; `before_RM` if it reads tokens."""
        assert self.confidence_1W is not None
        read = h_RD.float()
        if self.head.confidence_reads_token:
            assert before_RM is not None
            read = torch.cat((read, before_RM), dim=-1)
        return torch.sigmoid(read @ self.confidence_1W[0] + self.confidence_bias)
