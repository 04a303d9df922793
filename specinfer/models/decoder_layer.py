"""DecoderLayer: attention or a recurrent block, and an MLP; the form of both is in the config.

Shapes: T rows of a step, D hidden size.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from specinfer.attention.backend import Attend, AttentionSpec, Rotation
from specinfer.kernels.layer_parts import LayerParts, PerLayerParts
from specinfer.kernels.low_rank import OUT, QKV, AdaptedLayer, times
from specinfer.kernels.ops import NormParts
from specinfer.kernels.product import Product
from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.states import StatePass
from specinfer.models.beside import Beside
from specinfer.models.config import ModelConfig
from specinfer.models.decoder_shapes import norm_names
from specinfer.models.experts import Mixture, mixture
from specinfer.models.layers import MLP, RowNorm, attention_spec
from specinfer.models.per_layer import per_layer_parts
from specinfer.models.recurrent import recurrent
from specinfer.models.weight_memory import Weights, first_matrices

# Places among a layer's norms.
BEFORE_ATTENTION, BEFORE_MLP, AFTER_ATTENTION, AFTER_MLP = range(4)


class DecoderLayer:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), or another form in its config.

    A recurrent block may stand in place of attention, or beside it. Either half of the layer may be missing.

    Each norm fuses the residual add before it: a layer gets the last block's output, not yet added to x, and
    returns its MLP's. `parts` are for a native call, which computes the same.
    """

    __slots__ = ("_beside", "_config", "_mlp", "_ops", "parts")

    def __init__(
        self, layer: int, config: ModelConfig, weights: Weights, prefix: str, *, input_norm: bool = True
    ) -> None:
        """Tensor names start with `prefix`; without `input_norm` it has no norm before attention."""
        self._config, self._ops = config, weights.kernels.ops
        rope: Literal["global", "local", "none"] = "global"
        if config.rope is None or layer in config.layers_without_rope:
            rope = "none"
        elif config.layer_windows[layer] is not None:
            rope = "local"

        def norm(name: str | None) -> NormParts | None:
            return None if name is None else RowNorm.of(f"{prefix}.{name}", config, weights).parts

        def linear(bias: bool, *names: str, **how: Any) -> Product:
            return weights.linear(*(f"{prefix}.{name}" for name in names), bias=bias, **how)

        number = config.stage.first + layer
        first, *others = norm_names(config, number)
        norms = [norm(name) for name in (first if input_norm else None, *others)]
        part = config.part.of_layer(layer)
        heads: AttentionSpec | None = None
        products = list[Product]()
        if layer in config.attention_layers:
            heads = attention_spec(layer, config, weights, f"{prefix}.self_attn")
            names = config.query_rows(layer)
            rows = [part.keys if name in ("k_proj", "v_proj") else part.queries for name in names]
            products.append(linear(config.qkv_bias, *(f"self_attn.{name}" for name in names), rows=rows))
            products.append(linear(config.o_bias, "self_attn.o_proj", columns=part.queries, parts=part.o))
        recurrence: RecurrenceParts | None = None
        if layer in config.recurrent_layers and config.recurrence is not None:
            recurrence = recurrent(layer, config, config.recurrence, weights, f"{prefix}.mixer")
        experts = config.experts_of(number)
        self._mlp: MLP | Mixture | None = None
        if number in config.layers_without_mlp:
            pass
        elif experts is not None and not experts.beside:
            self._mlp = mixture(config, experts, weights, f"{prefix}.mlp")
        else:
            matrices = first_matrices("mlp", gated=config.gated_mlp)
            self._mlp = MLP(
                linear(config.mlp_bias, *matrices, rows=[part.inner] * len(matrices)),
                linear(config.mlp_bias, "mlp.down_proj", columns=part.inner, parts=part.down),
                config.activation,
                self._ops,
                gated=config.gated_mlp,
                sparsity=0.0 if config.altup is None else config.altup.sparsity[layer],
            )
            products += self._mlp.products
        per_layer: PerLayerParts | None = None
        if config.per_layer is not None:
            per_layer = per_layer_parts(layer, config, config.per_layer, weights, prefix)
        self.parts = LayerParts(
            norms=norms,
            heads=heads,
            recurrence=recurrence,
            products=tuple(products),
            experts=self._mlp.parts if isinstance(self._mlp, Mixture) else None,
            rope=rope,
            parallel=config.parallel_block,
            activation=config.activation.value,
            gated=config.gated_mlp,
            clip=config.qkv_clip,
            scale=config.residual_scale,
            per_layer=per_layer,
            factor=weights.exact(f"{prefix}.layer_scalar") if config.output_factor else None,
        )
        self._beside: Beside | None = None
        if experts is not None and experts.beside:
            self._beside = Beside(config, experts, weights, prefix)

    @property
    def heads(self) -> AttentionSpec:
        """Its attention, without products."""
        assert self.parts.heads is not None, "layers of heads have attention"
        return self.parts.heads

    def __call__(
        self,
        x_TD: Tensor,
        y_TD: Tensor | None,
        rope: Rotation | None,
        attend: Attend,
        adapted: AdaptedLayer | None = None,
        states: StatePass | None = None,
        per_layer_TC: Tensor | None = None,
    ) -> Tensor:
        """Return the term to be added to x, [T, D]; x += y in place.

        `per_layer_TC` are the per-layer inputs of all layers, if the model has any.
        """
        if self.parts.heads is None and self.parts.recurrence is None:
            return self._behind_mlp(self.normed(x_TD, y_TD, BEFORE_MLP), adapted, x_TD)
        given_TD = self.normed(x_TD, y_TD, BEFORE_ATTENTION)
        y_TD = self.of_normed(x_TD, given_TD, rope, attend, adapted, states)
        if per_layer_TC is not None:
            x_TD += y_TD
            y_TD = self._of_inputs(x_TD, per_layer_TC)
        if self.parts.factor is not None:
            x_TD *= self.parts.factor
            y_TD *= self.parts.factor
        return y_TD

    def normed(self, x_TD: Tensor, y_TD: Tensor | None, place: int) -> Tensor:
        """x += y in place, if there is a y; then the norm of x at that place, or x itself without one."""
        if (norm := self.parts.norms[place]) is not None:
            return self._ops.add_norm(x_TD, y_TD, norm)
        if y_TD is not None:
            x_TD += y_TD
        return x_TD

    def of_normed(
        self,
        x_TD: Tensor,
        given_TC: Tensor,
        rope: Rotation | None,
        attend: Attend,
        adapted: AdaptedLayer | None = None,
        states: StatePass | None = None,
    ) -> Tensor:
        """The same with given inputs of q, k and v, and nothing to be added to x first."""
        made_TD: Tensor | None = None  # the output of attention, of the recurrent block, or their sum
        if self.parts.heads is not None:
            made_TD = self.attended(given_TC, rope, attend, adapted)
        if self.parts.recurrence is not None:
            assert states is not None, "a runner passes the states of recurrent layers"
            own = adapted
            if made_TD is not None and adapted is not None:  # its numbers are of a layer behind the last
                own = adapted._replace(layer=self._config.num_layers + adapted.layer)
            other_TD = self._remembered(given_TC, states, own)
            made_TD = other_TD if made_TD is None else made_TD + other_TD
        assert made_TD is not None, "layers without either are an MLP alone"
        if self.parts.parallel:
            if self.parts.norms[BEFORE_MLP] is not None:
                given_TC = self.normed(x_TD, None, BEFORE_MLP)
            return self._term(made_TD + self.mlp_output(given_TC, adapted, x_TD), None)
        y_TD = self._term(made_TD, AFTER_ATTENTION)
        if self._mlp is None:
            return y_TD
        return self._behind_mlp(self.normed(x_TD, y_TD, BEFORE_MLP), adapted, x_TD)

    def attended(
        self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapted: AdaptedLayer | None = None
    ) -> Tensor:
        """The output of attention, [T, D] -> [T, D]; `attend` writes this layer's K and V."""
        heads, (qkv, o), clip = self.heads, self.parts.products[:2], self.parts.clip
        qkv_TC = times(qkv, QKV, x_TD, adapted)
        if clip is not None:
            qkv_TC = qkv_TC.clamp_(-clip, clip)
        if not heads.gated:
            return times(o, OUT, attend(heads, qkv_TC, rotation), adapted)
        size = heads.num_heads * heads.head_dim
        attended_TC = attend(heads, qkv_TC[:, :-size].contiguous(), rotation)
        attended_TC = self._ops.open_values(attended_TC, qkv_TC[:, -size:])
        return times(o, OUT, attended_TC, adapted)

    def _remembered(self, x_TD: Tensor, states: StatePass, adapted: AdaptedLayer | None) -> Tensor:
        """The output of the recurrent block, [T, D] -> [T, D]; changes states as kernels/states.py says."""
        parts = self.parts.recurrence
        assert parts is not None, "the caller has looked"
        first, last = parts.products
        gates_TG = None if parts.gates is None else parts.gates(x_TD.float())
        made_TC = times(first, QKV, x_TD, adapted)
        return times(last, OUT, self._ops.recur(parts, made_TC, gates_TG, states), adapted)

    def _of_inputs(self, x_TD: Tensor, inputs_TC: Tensor) -> Tensor:
        """The term of per-layer inputs, [T, D]; these are of all layers."""
        own = self.parts.per_layer
        assert own is not None, "such inputs are those of its model"
        gate_TP = own.gate(x_TD)
        own_TP = inputs_TC[:, own.first : own.first + gate_TP.shape[1]]
        made_TP = self._ops.gate(torch.cat([gate_TP, own_TP], 1), self.parts.activation)
        return self._ops.add_norm(own.out(made_TP), None, own.after)

    def _behind_mlp(self, given_TD: Tensor, adapted: AdaptedLayer | None, x_TD: Tensor) -> Tensor:
        """The term to be added to x after the MLP."""
        return self._term(self.mlp_output(given_TD, adapted, x_TD), AFTER_MLP)

    def mlp_output(self, input_TD: Tensor, adapted: AdaptedLayer | None, x_TD: Tensor) -> Tensor:
        """The output of the MLP or mixture; adapters do not change mixtures. `x_TD` is before the norm."""
        mlp = self._mlp
        assert mlp is not None, "only attention and recurrences stand alone"
        if isinstance(mlp, Mixture):
            return mlp(input_TD)
        made_TD = mlp(input_TD, adapted)
        return made_TD if self._beside is None else self._beside(made_TD, x_TD)

    def _term(self, made_TD: Tensor, place: int | None) -> Tensor:
        """The term still to be added to x after a block and its norm; overwrites `made_TD`."""
        if place is not None:
            made_TD = self.normed(made_TD, None, place)
        if self.parts.scale != 1.0:
            made_TD *= self.parts.scale
        return made_TD
