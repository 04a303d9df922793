"""OPT: learned positions, LayerNorm, a plain MLP; the model family of the SpecInfer paper's speculators.

Shapes: T rows of a step, R of them that are chosen, D hidden size, E embedding size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import Product
from specinfer.models.config import ModelConfig, NormPlace
from specinfer.models.decoder import check_computed
from specinfer.models.language_model import LanguageModel, PassContext, Residual, Taps, check_taps
from specinfer.models.layers import ACTIVATIONS, Attention, LayerNorm, embedding_and_output
from specinfer.models.weight_memory import Weights

# OPT's position table starts two rows in: fairseq kept those for padding.
_POSITION_OFFSET = 2


class OPTDecoder(LanguageModel):
    """The decoder of OPT-125m to OPT-66b, OPT-350m with its own norm order and embedding size included."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.table, self.output = embedding_and_output(config, weights, "model.decoder.embed_tokens")
        self._positions_PD: Tensor | None = None
        self._project_in: Product | None = None
        self._project_out: Product | None = None
        if config.stage.begins:
            self._positions_PD = weights.tensor("model.decoder.embed_positions.weight")
        if config.stage.begins and config.embedding_size != config.hidden_size:
            self._project_in = weights.linear("model.decoder.project_in")
            self._project_out = weights.linear("model.decoder.project_out")
        self._final_norm: LayerNorm | None = None
        if config.final_norm:
            self._final_norm = _norm("model.decoder.final_layer_norm", config, weights)
        first = config.stage.first
        self._layers = weights.each(
            lambda i: _Layer(i, config, weights, f"model.decoder.layers.{first + i}"), config.num_layers
        )

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Residual:
        """What the first layer is given: tokens and their positions; see LanguageModel."""
        assert self._positions_PD is not None, "the first stage embeds"
        rows_NE, places_T = self.table.rows(token_ids_T)
        x_TD = F.embedding(places_T, rows_NE)
        if self._project_in is not None:
            x_TD = self._project_in(x_TD)
        return Residual(x_TD + F.embedding(positions_T + _POSITION_OFFSET, self._positions_PD))

    def run_layers(self, residual: Residual, context: PassContext) -> tuple[Residual, Tensor | None]:
        """What the layers make of `residual`, and their tapped inputs; see LanguageModel."""
        stage = self.config.stage
        check_taps(context.taps, stage)
        seen = Taps(context.taps, residual.x_TD)
        for i, layer in enumerate(self._layers, start=stage.first):
            seen.see(i, residual)
            residual = Residual(layer(residual.summed(), context.attend))
        seen.see(stage.behind, residual)
        return residual, seen.tapped_TND

    def final_norm(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """What the head reads of these rows (None: all), [R, D]; see LanguageModel."""
        x_TD = residual.summed()
        if rows is not None:
            x_TD = x_TD.index_select(0, rows)
        return x_TD if self._final_norm is None else self._final_norm(x_TD)

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `final_norm`, [R, V]; see LanguageModel."""
        return self.output(h_RD if self._project_out is None else self._project_out(h_RD))


class _Layer:
    """One layer; `norm_place` says whether a block's norm stands before it or after the sum."""

    __slots__ = ("_activation", "_attention", "_attention_norm", "_fc1", "_fc2", "_mlp_norm", "_norm_first")

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, prefix: str) -> None:
        def linear(
            bias: bool,
            *names: str,
            rows: Sequence[range | None] = (),
            columns: range | None = None,
            parts: SumParts | None = None,
        ) -> Product:
            full = [f"{prefix}.{name}" for name in names]
            return weights.linear(*full, bias=bias, rows=rows, columns=columns, parts=parts)

        part = config.part
        heads = [part.queries, part.keys, part.keys]
        self._norm_first = config.norm_place is NormPlace.BEFORE
        self._activation = ACTIVATIONS[config.activation]
        self._attention_norm = _norm(f"{prefix}.self_attn_layer_norm", config, weights)
        self._mlp_norm = _norm(f"{prefix}.final_layer_norm", config, weights)
        self._attention = Attention(
            layer,
            config,
            linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", rows=heads),
            linear(config.o_bias, "self_attn.out_proj", columns=part.queries, parts=part.o),
        )
        self._fc1 = linear(config.mlp_bias, "fc1", rows=[part.inner])
        self._fc2 = linear(config.mlp_bias, "fc2", columns=part.inner, parts=part.down)

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        if self._norm_first:
            x_TD = x_TD + self._attention(self._attention_norm(x_TD), None, attend)
            return x_TD + self._mlp(self._mlp_norm(x_TD))
        x_TD = self._attention_norm(x_TD + self._attention(x_TD, None, attend))
        return self._mlp_norm(x_TD + self._mlp(x_TD))

    def _mlp(self, x_TD: Tensor) -> Tensor:
        return self._fc2(self._activation(self._fc1(x_TD)))


def _norm(name: str, config: ModelConfig, weights: Weights) -> LayerNorm:
    return LayerNorm(weights.tensor(f"{name}.weight"), weights.tensor(f"{name}.bias"), config.norm_eps)


def opt_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors an OPTDecoder of this config asks for, by name, with their shapes."""
    check_computed(config)
    hidden, inner, embedding = config.hidden_size, config.intermediate_size, config.embedding_size
    root = "model.decoder"
    shapes: dict[str, tuple[int, ...]] = {}
    if config.stage.begins:
        shapes[f"{root}.embed_tokens.weight"] = (config.vocab_size, embedding)
        shapes[f"{root}.embed_positions.weight"] = (config.max_context + _POSITION_OFFSET, hidden)
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, embedding)
        if embedding != hidden:
            shapes[f"{root}.project_in.weight"] = (hidden, embedding)
            shapes[f"{root}.project_out.weight"] = (embedding, hidden)
    norms = [f"{root}.final_layer_norm"] if config.final_norm else []
    matrices = [(f"self_attn.{x}_proj", hidden, hidden, config.qkv_bias) for x in "qkv"]
    matrices.append(("self_attn.out_proj", hidden, hidden, config.o_bias))
    matrices += [("fc1", inner, hidden, config.mlp_bias), ("fc2", hidden, inner, config.mlp_bias)]
    for i in range(config.stage.first, config.stage.behind):
        prefix = f"{root}.layers.{i}"
        norms += [f"{prefix}.self_attn_layer_norm", f"{prefix}.final_layer_norm"]
        for name, rows, columns, bias in matrices:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
    return shapes
