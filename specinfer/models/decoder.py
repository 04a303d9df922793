"""The decoder of Llama, Mistral, Qwen2, Qwen3 and Gemma 3: one class, and a family is a config.

Shapes: T rows of a step, R rows that want logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specinfer.attention.backend import Attend, AttentionSpec, Rotation
from specinfer.attention.native import NativeAttend
from specinfer.errors import ModelError
from specinfer.kernels.decoder import LayerParts, NativeDecoder, NativeLayers
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import Product
from specinfer.models.config import Activation, ModelConfig, Norm, NormPlace, QkNorm
from specinfer.models.language_model import LanguageModel, PassContext, Read, Residual, Taps, check_taps
from specinfer.models.layers import Attention, GatedMLP, RMSNorm, embedding_and_output
from specinfer.models.rope import RotaryEmbedding, rotations
from specinfer.models.weight_memory import Weights


class Decoder(LanguageModel):
    """A decoder-only transformer with RMSNorm, rope and a gated MLP."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert config.rope is not None, f"{config.family} has no rope"
        super().__init__(config, weights)
        # The largest matrices come first: copies of them as they are read are gone before the layers come.
        self.table, self.output = embedding_and_output(config, weights, "model.embed_tokens")
        # transformers rounds Gemma's scale to the model's dtype; so it was trained, so we do.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self._final_norm = RMSNorm(
            weights.tensor("model.norm.weight", plus=config.norm_weight_offset),
            config.norm_eps,
            weights.kernels.ops,
        )
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self.device)
        self._local_rope = (
            None
            if config.local_rope is None
            else RotaryEmbedding(config.local_rope, config.head_dim, self.device)
        )
        stage = config.stage
        self._layers: Sequence[DecoderLayer] = weights.each(
            lambda i: DecoderLayer(i, config, weights, f"model.layers.{stage.first + i}"), config.num_layers
        )
        native: NativeLayers | None = None
        # Of ReLU there is no native gate, and a single call cannot wait for weights.
        if config.activation is not Activation.RELU and self.stream is None:
            parts = [layer.parts() for layer in self._layers]
            gelu = config.activation is Activation.GELU_TANH
            native = NativeLayers.of(parts, weights.kernels.ops, gelu=gelu)
        local = self._rope if self._local_rope is None else self._local_rope
        self._native: NativeDecoder | None = None
        if native is not None:
            self._native = NativeDecoder(
                *(native, self.table.whole, self._embedding_scale if stage.begins else 1.0),
                self._final_norm.weight_D,
                output=self.output,
                rotations=partial(rotations, [self._rope, local], config.max_context),
            )

    @property
    def embedding(self) -> tuple[Tensor, float]:
        """What `embed` looks up, [V, D], and multiplies with; the table must be in memory."""
        assert self.table.whole is not None, "somebody reads the whole table"
        return self.table.whole, self._embedding_scale

    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        most_logits: int = 0,
        given_TD: Tensor | None = None,
    ) -> Read:
        """A whole pass up to the head; see LanguageModel."""
        attend, stage = context.attend, self.config.stage
        if self._native is None or not isinstance(attend, NativeAttend) or not token_ids_T.numel():
            return super().read(token_ids_T, context, rows, given_TD=given_TD)
        check_taps(context.taps, stage)
        if self.config.logit_softcap is not None:
            most_logits = 0  # the head's product is not all of them
        taps = [tap - stage.first for tap in context.taps]
        if not stage.ends:  # what the last of these layers leaves is handed on
            taps.append(self.config.num_layers)
            rows, most_logits = token_ids_T[:0], 0
        embedding_ND = None
        if given_TD is not None:  # what lies there is looked up as embeddings are
            embedding_ND, token_ids_T = given_TD, torch.arange(len(given_TD))
        elif self.table.whole is None:
            embedding_ND, token_ids_T = self.table.rows(token_ids_T)
        hidden_RD, tapped_TND, logits_RV = self._native(
            *(token_ids_T, context.positions_T, rows, attend, taps, most_logits, embedding_ND)
        )
        if stage.ends or tapped_TND is None:
            return Read(hidden_RD, tapped_TND, logits_RV)
        handed_TD = tapped_TND[:, -1].contiguous()
        tapped_TND = tapped_TND[:, :-1].contiguous() if context.taps else None
        return Read(hidden_RD, tapped_TND, handed_TD=handed_TD)

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Residual:
        """What the first layer is given; see LanguageModel. Positions are a matter of its attention."""
        rows_ND, places_T = self.table.rows(token_ids_T)
        return Residual(self.kernels.ops.embed(places_T, rows_ND, self._embedding_scale))

    def run_layers(self, residual: Residual, context: PassContext) -> tuple[Residual, Tensor | None]:
        """What the layers make of `residual`, and their tapped inputs; see LanguageModel."""
        stage = self.config.stage
        check_taps(context.taps, stage)
        rope = local_rope = self._rope.at(context.positions_T)
        if self._local_rope is not None:
            local_rope = self._local_rope.at(context.positions_T)
        seen = Taps(context.taps, residual.x_TD)
        for i, layer in enumerate(self._layers, start=stage.first):
            seen.see(i, residual)
            own = local_rope if layer.local else rope
            y_TD = layer(residual.x_TD, residual.y_TD, own, context.attend)
            residual = Residual(residual.x_TD, y_TD)
        seen.see(stage.behind, residual)
        return residual, seen.tapped_TND

    def final_norm(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """What the head reads of these rows (None: all), [R, D]; see LanguageModel."""
        return self._final_norm.of_sum(residual.x_TD, residual.y_TD, rows)

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `final_norm`, [R, V]; see LanguageModel."""
        logits_RV, cap = self.output(h_RD), self.config.logit_softcap
        return logits_RV if cap is None else torch.tanh(logits_RV / cap) * cap


class DecoderLayer:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)); Gemma 3 also norms what is added.

    Each norm fuses the residual add before it: a layer is given the last block's output, not yet added to x,
    and returns its MLP's.
    """

    __slots__ = (
        *("_after_attention", "_after_mlp", "_attention", "_before_attention", "_before_mlp", "_mlp"),
        "local",
    )

    def __init__(
        self, layer: int, config: ModelConfig, weights: Weights, prefix: str, *, input_norm: bool = True
    ) -> None:
        """Its tensors' names begin with `prefix`; without `input_norm` it has no norm before attention."""
        self.local = config.layer_windows[layer] is not None

        def norm_weight(name: str) -> Tensor:
            return weights.tensor(f"{prefix}.{name}.weight", plus=config.norm_weight_offset)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(norm_weight(name), config.norm_eps, weights.kernels.ops)

        def linear(
            bias: bool,
            *names: str,
            rows: Sequence[range | None] = (),
            columns: range | None = None,
            parts: SumParts | None = None,
        ) -> Product:
            full = [f"{prefix}.{name}" for name in names]
            return weights.linear(*full, bias=bias, rows=rows, columns=columns, parts=parts)

        self._before_attention = norm("input_layernorm") if input_norm else None
        self._after_attention: RMSNorm | None = None
        self._after_mlp: RMSNorm | None = None
        if config.norm_place is NormPlace.BOTH:
            self._after_attention = norm("post_attention_layernorm")
            self._before_mlp = norm("pre_feedforward_layernorm")
            self._after_mlp = norm("post_feedforward_layernorm")
        else:
            self._before_mlp = norm("post_attention_layernorm")
        qk_norm: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if config.qk_norm is QkNorm.HEAD:
            qk_norm = norm_weight("self_attn.q_norm"), norm_weight("self_attn.k_norm")
        part = config.part
        heads = [part.queries, part.keys, part.keys]
        self._attention = Attention(
            layer,
            config,
            linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", rows=heads),
            linear(config.o_bias, "self_attn.o_proj", columns=part.queries, parts=part.o),
            qk_norm,
        )
        self._mlp = GatedMLP(
            linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj", rows=[part.inner, part.inner]),
            linear(config.mlp_bias, "mlp.down_proj", columns=part.inner, parts=part.down),
            config.activation,
            weights.kernels.ops,
        )

    @property
    def heads(self) -> AttentionSpec:
        """Its attention, apart from its products."""
        return self._attention.heads

    def __call__(self, x_TD: Tensor, y_TD: Tensor | None, rope: Rotation, attend: Attend) -> Tensor:
        """What is to be added to x, [T, D]; x += y in place, and more of the layer's own."""
        assert self._before_attention is not None
        return self.of_normed(x_TD, self._before_attention(x_TD, y_TD), rope, attend)

    def of_normed(self, x_TD: Tensor, given_TC: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        """The same where q, k and v are products with `given_TC`, and nothing is to be added to x first."""
        y_TD = self._attention(given_TC, rope, attend)
        if self._after_attention is not None:
            y_TD = self._after_attention(y_TD)
        y_TD = self._mlp(self._before_mlp(x_TD, y_TD))
        return y_TD if self._after_mlp is None else self._after_mlp(y_TD)

    def parts(self) -> LayerParts:
        """What it is made of."""
        after_attention, after_mlp = self._after_attention, self._after_mlp
        assert self._before_attention is not None
        return LayerParts(
            before_attention_D=self._before_attention.weight_D,
            before_mlp_D=self._before_mlp.weight_D,
            after_attention_D=None if after_attention is None else after_attention.weight_D,
            after_mlp_D=None if after_mlp is None else after_mlp.weight_D,
            heads=self._attention.heads,
            products=(self._attention.qkv, self._attention.o, self._mlp.gate_up, self._mlp.down),
            local=self.local,
        )


def check_computed(config: ModelConfig) -> None:
    """Raise ModelError for a switch that no decoder obeys yet."""
    later = {
        "norm": config.norm is not Norm.RMS and not config.learned_positions,
        "norm_place": config.norm_place is NormPlace.BEHIND,
        "qk_norm": config.qk_norm is QkNorm.WHOLE,
        "gated_mlp": not config.gated_mlp and not config.learned_positions,
        "activation": config.activation is Activation.GELU,
        "layers_without_rope": bool(config.layers_without_rope),
        "alibi": config.alibi is not None,
        "parallel_block": config.parallel_block,
        "qkv_clip": config.qkv_clip is not None,
        "attention_softcap": config.attention_softcap is not None,
        "attention_sinks": config.attention_sinks,
        "residual_scale": config.residual_scale != 1.0,
        "logit_scale": config.logit_scale != 1.0,
    }
    if refused := [name for name, there in later.items() if there]:
        raise ModelError(f"the model has {', '.join(refused)} of a kind that is not computed yet")


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a Decoder of this config asks for, by name, with their shapes."""
    check_computed(config)
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    if config.stage.begins:
        shapes["model.embed_tokens.weight"] = (config.vocab_size, hidden)
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.norm_place is NormPlace.BOTH:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    matrices = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for i in range(config.stage.first, config.stage.behind):
        prefix = f"model.layers.{i}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in norms}
        if config.qk_norm is QkNorm.HEAD:
            shapes |= {f"{prefix}.self_attn.{x}_norm.weight": (head,) for x in "qk"}
        for name, rows, columns, bias in matrices:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes
