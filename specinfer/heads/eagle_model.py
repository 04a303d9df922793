"""A head of EAGLE's shape as the engine runs it: rows of all requests, attention along paths.

heads/eagle.py says what it computes. Shapes: T rows, N taps, D the head's hidden size, U tokens it can name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.attention.backend import Attend, Rotation
from specinfer.heads.config import EagleConfig
from specinfer.models.decoder import DecoderLayer
from specinfer.models.language_model import LanguageModel, Residual
from specinfer.models.layers import Attention, GatedMLP, RMSNorm
from specinfer.models.rope import RotaryEmbedding
from specinfer.models.weight_memory import Weights


class EagleModel:
    """The head over products and attention of the kernels; it knows neither requests nor caches."""

    def __init__(
        self, head: EagleConfig, weights: Weights, target: LanguageModel, ids: Sequence[int]
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

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{name}.weight"), eps, ops)

        self._target = target
        self._embedding_VD = weights.tensor("embed_tokens.weight") if head.own_embedding else None
        self._head = weights.linear("lm_head")
        self._input_norm = norm("input_norm") if head.norm_before_fc else None
        self._fc_norms = [norm(f"fc_norm.{i}") for i in range(len(head.taps))] if head.fc_norm else []
        self._fc = weights.linear("fc", bias=head.fc_bias)
        self._first = _FirstLayer(head, weights)
        self._others = [DecoderLayer(i, body, weights, f"layers.{i}") for i in range(1, body.num_layers)]
        self._norm = None if head.fc_reads_token else norm("norm")
        self._rope = RotaryEmbedding(body.rope, body.head_dim, self.device)
        self._masked_1D: Tensor | None = None  # of rows below the first, where all levels come from one pass
        if head.mask_token_id is not None:
            taps_1ND = weights.tensor("mask_hidden").view(1, len(head.taps), head.target_hidden_size)
            self._masked_1D = self.fused(taps_1ND)

    def masked(self, count: int) -> Tensor:
        """The features of so many rows of mask tokens, [count, D]; of a head that guesses in one pass."""
        assert self._masked_1D is not None
        return self._masked_1D.expand(count, -1)

    def fused(self, taps_TND: Tensor) -> Tensor:
        """What the head makes of the target's hidden states, [T, D]."""
        if self.head.fc_reads_token:
            return self._target.final_norm(Residual(taps_TND.squeeze(1).contiguous()))
        if self._fc_norms:
            parts = [norm(taps_TND[:, i].contiguous()) for i, norm in enumerate(self._fc_norms)]
            flat = torch.cat(parts, dim=-1)
        else:
            flat = taps_TND.flatten(1)
        return self._fc(flat if self._input_norm is None else self._input_norm(flat))

    def run(
        self, token_ids_T: Tensor, feature_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """What the output layer reads of each row, and what a row below it is fed, both [T, D].

        `feature_TD` is used up: it may be written to.
        """
        rope = self._rope.at(positions_T)
        if self._embedding_VD is None:
            embedded_TD = self._target.embed(token_ids_T, positions_T).summed()
        else:
            embedded_TD = self.kernels.ops.embed(token_ids_T, self._embedding_VD, 1.0)
        if self.head.fc_reads_token:
            feature_TD = self._fc(torch.cat((embedded_TD, feature_TD), dim=-1))
        x_TD, y_TD = self._first(embedded_TD, feature_TD, rope, attend)
        for layer in self._others:
            y_TD = layer(x_TD, y_TD, rope, attend)
        if self._norm is None:
            x_TD = x_TD + y_TD
            return x_TD, x_TD
        read_TD = self._norm(x_TD, y_TD)
        return read_TD, read_TD if self.head.norm_output else x_TD

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of the tokens it can name, of rows the output layer reads, [R, U]."""
        return self._head(h_RD)


class _FirstLayer:
    """The layer that reads a token's embedding beside the hidden state: q, k and v are products with both.

    That of EAGLE-1 and 2 is given what fc made of both, without a norm.
    """

    def __init__(self, head: EagleConfig, weights: Weights) -> None:
        body, ops = head.body, weights.kernels.ops
        prefix = "layers.0"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{prefix}.{name}.weight"), body.norm_eps, ops)

        self._of_token = None if head.fc_reads_token else norm("input_layernorm")
        self._of_hidden = None if head.fc_reads_token else norm("hidden_norm")
        self._before_mlp = norm("post_attention_layernorm")
        self._normed_stream = head.norm_before_residual
        qk_norm: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if body.qk_norm:
            q_H, k_H = (weights.tensor(f"{prefix}.self_attn.{x}_norm.weight") for x in "qk")
            qk_norm = (q_H, k_H)
        self._attention = Attention(
            0,
            body,
            weights.linear(*(f"{prefix}.self_attn.{x}_proj" for x in "qkv"), bias=body.qkv_bias),
            weights.linear(f"{prefix}.self_attn.o_proj", bias=body.o_bias),
            qk_norm,
        )
        self._mlp = GatedMLP(
            weights.linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", bias=body.mlp_bias),
            weights.linear(f"{prefix}.mlp.down_proj", bias=body.mlp_bias),
            body.activation,
            ops,
        )

    def __call__(
        self, embedded_TD: Tensor, x_TD: Tensor, rope: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream, and what is to be added to it; `x_TD` may be written to."""
        given_TC = x_TD
        if self._of_token is not None and self._of_hidden is not None:
            hidden_TD = self._of_hidden(x_TD)
            given_TC = torch.cat((self._of_token(embedded_TD), hidden_TD), dim=-1)
            if self._normed_stream:
                x_TD = hidden_TD
        y_TD = self._attention(given_TC, rope, attend)
        return x_TD, self._mlp(self._before_mlp(x_TD, y_TD))
