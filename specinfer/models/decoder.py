"""Decoder: one class for all families; a family is a config.

Shapes: T rows of a step, R rows with logits, D hidden size, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import Attend, AttentionSpec, Rotation
from specinfer.kernels.attention import NativeAttend
from specinfer.kernels.decoder import LayerParts, NativeDecoder, NativeLayers, Places
from specinfer.kernels.low_rank import AdaptedLayer
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import Product
from specinfer.models.config import ModelConfig, NormPlace, QkNorm
from specinfer.models.experts import Mixture, expert_matrices, mixture
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput, Residual, check_taps
from specinfer.models.layers import (
    MLP,
    Attention,
    RotaryEmbedding,
    RowNorm,
    attention_spec,
    embedding_and_output,
    rotations,
)
from specinfer.models.shared_sums import TableOnDisk
from specinfer.models.weight_memory import Weights


class Decoder(LanguageModel):
    """A decoder-only transformer, whose hidden states heads can read.

    A native call computes a pass, with the bits of `embed`, `run_layers` and `final_norm`.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        stage = config.stage
        # The largest matrices come first: temporary copies of them are freed before the layers are read.
        self.table, self.output = embedding_and_output(config, weights, "model.embed_tokens")
        # transformers rounds Gemma's scale to the model's dtype, also in training.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self._places: Places | None = None
        if config.learned_positions and stage.begins:
            self._places = Places(weights.tensor("model.embed_positions.weight"), config.position_offset)
        self._final_norm = RowNorm.of("model.norm", config, weights)
        self._ropes = [
            RotaryEmbedding(rope, config.head_dim, self.device)
            for rope in (config.rope, config.local_rope)
            if rope is not None
        ]
        # True if logits need operations after the product of the output layer.
        self._changes_logits = config.logit_scale != 1.0 or config.logit_softcap is not None
        self._layers: Iterable[DecoderLayer] = weights.each(
            lambda i: DecoderLayer(i, config, weights, f"model.layers.{stage.first + i}"), config.num_layers
        )
        native: NativeLayers | None = None
        if self.stream is None:  # a single call cannot wait for weights
            native = NativeLayers.of([layer.parts() for layer in self._layers], weights.kernels.ops)
        self._native: NativeDecoder | None = None
        if native is not None:
            looks_up = stage.begins  # otherwise each call passes embedding rows
            self._native = NativeDecoder(
                native,
                self.table.whole if looks_up else None,
                self._embedding_scale if looks_up else 1.0,
                dtype=self.dtype,
                places=self._places if looks_up else None,
                norm=self._final_norm.parts,
                output=self.output,
                rotations=(len(self._ropes), partial(rotations, self._ropes, config.max_context)),
            )

    @property
    def embedding(self) -> tuple[Tensor, float]:
        """The embedding table [V, D], read if it is on disk, and its factor; ranks must not divide it."""
        whole = self.table.whole
        if isinstance(self.table, TableOnDisk):
            whole, _ = self.table.rows(torch.arange(self.config.vocab_size))
        assert whole is not None, "the whole table is needed"
        return whole, self._embedding_scale

    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        max_logits: int = 0,
        stage_input_TD: Tensor | None = None,
    ) -> PassOutput:
        """A whole pass up to the head; see LanguageModel."""
        attend, stage = context.attend, self.config.stage
        if self._native is None or not isinstance(attend, NativeAttend) or not token_ids_T.numel():
            return self.read_by_layers(token_ids_T, context, rows, stage_input_TD)
        check_taps(context.taps, stage)
        if self._changes_logits:
            max_logits = 0  # the native call computes the product alone
        taps = [tap - stage.first for tap in context.taps]
        if not stage.ends:  # the output of the last layer here goes to the next stage
            taps.append(self.config.num_layers)
            rows, max_logits = token_ids_T[:0], 0
        embedding_ND = None
        if stage_input_TD is not None:  # looked up in place of embeddings
            embedding_ND, token_ids_T = stage_input_TD, torch.arange(len(stage_input_TD))
        elif self.table.whole is None:
            embedding_ND, token_ids_T = self.table.rows(token_ids_T)
        hidden_RD, tapped_TND, logits_RV = self._native(
            *(token_ids_T, context.positions_T, rows, attend, taps, max_logits, embedding_ND),
            adapted=context.adapted,
        )
        if stage.ends or tapped_TND is None:
            return PassOutput(hidden_RD, tapped_TND, logits_RV)
        stage_output_TD = tapped_TND[:, -1].contiguous()
        tapped_TND = tapped_TND[:, :-1].contiguous() if context.taps else None
        return PassOutput(hidden_RD, tapped_TND, stage_output_TD=stage_output_TD)

    def read_by_layers(
        self, token_ids_T: Tensor, context: PassContext, rows: Tensor | None, stage_input_TD: Tensor | None
    ) -> PassOutput:
        """As `read`, without the native call."""
        residual = (
            self.embed(token_ids_T, context.positions_T)
            if stage_input_TD is None
            else Residual(stage_input_TD)
        )
        residual, tapped_TND = self.run_layers(residual, context)
        if self.config.stage.ends:
            return PassOutput(self.final_norm(residual, rows), tapped_TND)
        stage_output_TD = residual.summed()
        return PassOutput(stage_output_TD[:0], tapped_TND, stage_output_TD=stage_output_TD)

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Residual:
        """The input of the first layer.

        Both are int64 [T]; a position is the token's place in its text.
        """
        rows_ND, places_T = self.table.rows(token_ids_T)
        x_TD = self.kernels.ops.embed(places_T, rows_ND, self._embedding_scale)
        if self._places is not None:
            x_TD += F.embedding(positions_T + self._places.offset, self._places.table_PD)
        return Residual(x_TD)

    def run_layers(self, residual: Residual, context: PassContext) -> tuple[Residual, Tensor | None]:
        """The output of the layers for `residual`, and the inputs of tapped layers, [T, N, D].

        Tap i is hidden_states[i] in transformers' counting, before layer i's first norm; the number of layers
        means the last layer's output. Layers of a stage are numbered as in the whole model. Overwrites the
        tensors of `residual`.
        """
        stage, taps = self.config.stage, context.taps
        check_taps(taps, stage)
        tapped_TND = residual.x_TD.new_empty(len(residual.x_TD), len(taps), residual.x_TD.shape[1])

        def see(layer: int, residual: Residual) -> None:
            """Copy the input of a tapped layer."""
            for place, wanted in enumerate(taps):
                if wanted == layer:
                    tapped_TND[:, place] = residual.summed()

        turns: dict[str, Rotation | None] = {"none": None}
        if self._ropes:
            turned = [rope.at(context.positions_T) for rope in self._ropes]
            turns |= {"global": turned[0], "local": turned[-1]}
        for i, layer in enumerate(self._layers, start=stage.first):
            see(i, residual)
            adapted = AdaptedLayer.of(context.adapted, i - stage.first)
            y_TD = layer(residual.x_TD, residual.y_TD, turns[layer.rope], context.attend, adapted)
            residual = Residual(residual.x_TD, y_TD)
        see(stage.end, residual)
        return residual, tapped_TND if taps else None

    def final_norm(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """The head's input for these rows (int64; None: all), [R, D]; `residual` is unchanged."""
        return self._final_norm.of_sum(residual.x_TD, residual.y_TD, rows)

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `final_norm`, [R, V]; see LanguageModel."""
        logits_RV = self.output(h_RD)
        if self.config.logit_scale != 1.0:
            logits_RV = logits_RV * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits_RV if cap is None else torch.tanh(logits_RV / cap) * cap


class DecoderLayer:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), or another form in its config.

    Each norm fuses the residual add before it: a layer gets the last block's output, not yet added to x, and
    returns its MLP's.
    """

    __slots__ = (
        *("_after_attention", "_after_mlp", "_before_attention", "_before_mlp"),
        *("_attention", "_config", "_mlp", "rope"),
    )

    def __init__(
        self, layer: int, config: ModelConfig, weights: Weights, prefix: str, *, input_norm: bool = True
    ) -> None:
        """Tensor names start with `prefix`; without `input_norm` it has no norm before attention."""
        self._config = config
        self.rope: Literal["global", "local", "none"] = "global"
        if config.rope is None or layer in config.layers_without_rope:
            self.rope = "none"
        elif config.layer_windows[layer] is not None:
            self.rope = "local"

        def norm(name: str | None) -> RowNorm | None:
            return None if name is None else RowNorm.of(f"{prefix}.{name}", config, weights)

        def linear(
            bias: bool,
            *names: str,
            rows: Sequence[range | None] = (),
            columns: range | None = None,
            parts: SumParts | None = None,
        ) -> Product:
            full = [f"{prefix}.{name}" for name in names]
            return weights.linear(*full, bias=bias, rows=rows, columns=columns, parts=parts)

        names = norm_names(config)
        self._before_attention = norm(names[0]) if input_norm else None
        self._after_attention = norm(names[1])
        self._before_mlp = norm(names[2])
        self._after_mlp = norm(names[3])
        part = config.part
        heads = [part.queries, part.keys, part.keys]
        self._attention = Attention(
            attention_spec(layer, config, weights, f"{prefix}.self_attn"),
            linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", rows=heads),
            linear(config.o_bias, "self_attn.o_proj", columns=part.queries, parts=part.o),
            config.qkv_clip,
        )
        first = ["mlp.gate_proj", "mlp.up_proj"] if config.gated_mlp else ["mlp.up_proj"]
        experts = config.experts_of(config.stage.first + layer)
        self._mlp: MLP | Mixture
        if experts is not None:
            self._mlp = mixture(config, experts, weights, f"{prefix}.mlp")
        else:
            self._mlp = MLP(
                linear(config.mlp_bias, *first, rows=[part.inner] * len(first)),
                linear(config.mlp_bias, "mlp.down_proj", columns=part.inner, parts=part.down),
                config.activation,
                weights.kernels.ops,
                gated=config.gated_mlp,
            )

    @property
    def heads(self) -> AttentionSpec:
        """Its attention, without products."""
        return self._attention.heads

    def __call__(
        self,
        x_TD: Tensor,
        y_TD: Tensor | None,
        rope: Rotation | None,
        attend: Attend,
        adapted: AdaptedLayer | None = None,
    ) -> Tensor:
        """Return the term to be added to x, [T, D]; x += y in place."""
        return self.of_normed(x_TD, _add_norm(x_TD, y_TD, self._before_attention), rope, attend, adapted)

    def of_normed(
        self,
        x_TD: Tensor,
        given_TC: Tensor,
        rope: Rotation | None,
        attend: Attend,
        adapted: AdaptedLayer | None = None,
    ) -> Tensor:
        """The same with given inputs of q, k and v, and nothing to be added to x first."""
        made_TD = self._attention(given_TC, rope, attend, adapted)
        if self._config.parallel_block:
            if self._before_mlp is not None:
                given_TC = self._before_mlp(x_TD)
            return self._term(made_TD + self._mlp_output(given_TC, adapted), None)
        y_TD = self._term(made_TD, self._after_attention)
        made_TD = self._mlp_output(_add_norm(x_TD, y_TD, self._before_mlp), adapted)
        return self._term(made_TD, self._after_mlp)

    def _mlp_output(self, input_TD: Tensor, adapted: AdaptedLayer | None) -> Tensor:
        """The output of the MLP or mixture; adapters do not change mixtures."""
        mlp = self._mlp
        return mlp(input_TD) if isinstance(mlp, Mixture) else mlp(input_TD, adapted)

    def _term(self, made_TD: Tensor, after: RowNorm | None) -> Tensor:
        """The term still to be added to x after a block; overwrites `made_TD`."""
        if after is not None:
            made_TD = after(made_TD)
        if self._config.residual_scale != 1.0:
            made_TD *= self._config.residual_scale
        return made_TD

    def parts(self) -> LayerParts:
        """Its parts for a native call."""
        config, attention, mlp = self._config, self._attention, self._mlp
        before, after = self._before_attention, self._after_attention
        norms = before, self._before_mlp, after, self._after_mlp
        return LayerParts(
            norms=[None if norm is None else norm.parts for norm in norms],
            heads=attention.heads,
            products=(attention.qkv, attention.o, *(() if isinstance(mlp, Mixture) else mlp.products)),
            experts=mlp.parts() if isinstance(mlp, Mixture) else None,
            rope=self.rope,
            parallel=config.parallel_block,
            activation=config.activation.value,
            gated=config.gated_mlp,
            clip=attention.clip,
            scale=config.residual_scale,
        )


def _add_norm(x_TD: Tensor, y_TD: Tensor | None, norm: RowNorm | None) -> Tensor:
    """x += y in place, if there is a y; then the norm of x, or x itself without a norm."""
    if norm is not None:
        return norm(x_TD, y_TD)
    if y_TD is not None:
        x_TD += y_TD
    return x_TD


def norm_names(config: ModelConfig) -> tuple[str | None, str | None, str | None, str | None]:
    """The names of a layer's norms: before and after attention, before and after the MLP."""
    if config.norm_place is NormPlace.BOTH:
        return (
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    if config.norm_place is NormPlace.BEHIND:
        return None, "post_attention_layernorm", None, "post_feedforward_layernorm"
    return "input_layernorm", None, None if config.shared_norm else "post_attention_layernorm", None


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a Decoder of this config asks for, by name, with their shapes."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {}
    if config.stage.begins:
        shapes["model.embed_tokens.weight"] = config.vocab_size, hidden
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = config.vocab_size, hidden
        if config.learned_positions:
            positions = config.max_context + config.position_offset
            shapes["model.embed_positions.weight"] = positions, hidden
    norms = ["model.norm"]
    matrices = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
    ]
    dense = [
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    if not config.gated_mlp:
        dense.pop(0)
    for i in range(config.stage.first, config.stage.end):
        prefix = f"model.layers.{i}"
        norms += [f"{prefix}.{name}" for name in norm_names(config) if name is not None]
        if config.qk_norm is not QkNorm.NONE:
            sizes = (q, kv) if config.qk_norm is QkNorm.WHOLE else (head, head)
            shapes |= {
                f"{prefix}.self_attn.{x}_norm.weight": (size,) for x, size in zip("qk", sizes, strict=True)
            }
        if config.attention_sinks:
            shapes[f"{prefix}.self_attn.sinks"] = (config.num_heads,)
        experts = config.experts_of(i)
        mlp = dense if experts is None else expert_matrices(experts, hidden)
        for name, rows, columns, bias in [*matrices, *mlp]:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    for name in norms:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)
    return shapes
