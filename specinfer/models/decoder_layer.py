"""DecoderLayer: attention or a recurrent block, and an MLP; the form of both is in the config.

Shapes: T rows of a step, D hidden size.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from specinfer.attention.backend import Attend, AttentionSpec, Rotation
from specinfer.kernels.layer_parts import LayerParts
from specinfer.kernels.low_rank import AdaptedLayer
from specinfer.kernels.product import Product
from specinfer.kernels.states import StatePass
from specinfer.models.config import ModelConfig
from specinfer.models.decoder_shapes import norm_names
from specinfer.models.experts import Mixture, mixture
from specinfer.models.layers import MLP, Attention, RowNorm, attention_spec
from specinfer.models.per_layer import PerLayerTerm
from specinfer.models.recurrent import Recurrent, recurrent
from specinfer.models.sources import QKV
from specinfer.models.weight_memory import Weights


class DecoderLayer:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), or another form in its config.

    A recurrent block may stand in place of attention, or beside it. Either half of the layer may be missing.

    Each norm fuses the residual add before it: a layer gets the last block's output, not yet added to x, and
    returns its MLP's.
    """

    __slots__ = (
        *("_after_attention", "_after_mlp", "_before_attention", "_before_mlp"),
        *("_attention", "_config", "_factor", "_mlp", "_per_layer", "_recurrent", "rope"),
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

        def linear(bias: bool, *names: str, **how: Any) -> Product:
            return weights.linear(*(f"{prefix}.{name}" for name in names), bias=bias, **how)

        number = config.stage.first + layer
        names = norm_names(config, number)
        self._before_attention = norm(names[0]) if input_norm else None
        self._after_attention = norm(names[1])
        self._before_mlp = norm(names[2])
        self._after_mlp = norm(names[3])
        part = config.part.of_layer(layer)
        heads = [part.queries, part.keys, part.keys, part.queries]
        self._attention: Attention | None = None
        if layer in config.attention_layers:
            spec = attention_spec(layer, config, weights, f"{prefix}.self_attn")
            matrices, own = [*QKV], slice(1 + spec.kv_matrices)
            if config.gated_attention:
                matrices, own = [*QKV, "self_attn.gate_proj"], slice(None)
            self._attention = Attention(
                spec,
                linear(config.qkv_bias, *matrices[own], rows=heads[: len(matrices)][own]),
                linear(config.o_bias, "self_attn.o_proj", columns=part.queries, parts=part.o),
                config.qkv_clip,
                weights.kernels.ops,
            )
        self._recurrent: Recurrent | None = None
        if layer in config.recurrent_layers and config.recurrence is not None:
            self._recurrent = recurrent(layer, config, config.recurrence, weights, f"{prefix}.mixer")
        first = ["mlp.gate_proj", "mlp.up_proj"] if config.gated_mlp else ["mlp.up_proj"]
        experts = config.experts_of(number)
        self._mlp: MLP | Mixture | None = None
        if number in config.layers_without_mlp:
            pass
        elif experts is not None:
            self._mlp = mixture(config, experts, weights, f"{prefix}.mlp")
        else:
            self._mlp = MLP(
                linear(config.mlp_bias, *first, rows=[part.inner] * len(first)),
                linear(config.mlp_bias, "mlp.down_proj", columns=part.inner, parts=part.down),
                config.activation,
                weights.kernels.ops,
                gated=config.gated_mlp,
                sparsity=0.0 if config.altup is None else config.altup.sparsity[layer],
            )
        self._per_layer: PerLayerTerm | None = None
        if config.per_layer is not None:
            self._per_layer = PerLayerTerm.of(layer, config, config.per_layer, weights, prefix)
        self._factor = weights.exact(f"{prefix}.layer_scalar") if config.output_factor else None

    @property
    def heads(self) -> AttentionSpec:
        """Its attention, without products."""
        assert self._attention is not None, "layers of heads have attention"
        return self._attention.heads

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
        if self._attention is None and self._recurrent is None:
            return self._behind_mlp(add_norm(x_TD, y_TD, self._before_mlp), adapted, x_TD)
        given_TD = add_norm(x_TD, y_TD, self._before_attention)
        y_TD = self.of_normed(x_TD, given_TD, rope, attend, adapted, states)
        if self._per_layer is not None and per_layer_TC is not None:
            x_TD += y_TD
            y_TD = self._per_layer(x_TD, per_layer_TC)
        if self._factor is not None:
            x_TD *= self._factor
            y_TD *= self._factor
        return y_TD

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
        if self._attention is not None:
            made_TD = self._attention(given_TC, rope, attend, adapted)
        if self._recurrent is not None:
            assert states is not None, "a runner passes the states of recurrent layers"
            own = adapted
            if made_TD is not None and adapted is not None:  # its numbers are of a layer behind the last
                own = adapted._replace(layer=self._config.num_layers + adapted.layer)
            other_TD = self._recurrent(given_TC, states, own)
            made_TD = other_TD if made_TD is None else made_TD + other_TD
        assert made_TD is not None, "layers without either are an MLP alone"
        if self._config.parallel_block:
            if self._before_mlp is not None:
                given_TC = self._before_mlp(x_TD)
            return self._term(made_TD + self._mlp_output(given_TC, adapted, x_TD), None)
        y_TD = self._term(made_TD, self._after_attention)
        if self._mlp is None:
            return y_TD
        return self._behind_mlp(add_norm(x_TD, y_TD, self._before_mlp), adapted, x_TD)

    def _behind_mlp(self, given_TD: Tensor, adapted: AdaptedLayer | None, x_TD: Tensor) -> Tensor:
        """The term to be added to x after the MLP."""
        return self._term(self._mlp_output(given_TD, adapted, x_TD), self._after_mlp)

    def _mlp_output(self, input_TD: Tensor, adapted: AdaptedLayer | None, x_TD: Tensor) -> Tensor:
        """The output of the MLP or mixture; adapters do not change mixtures. `x_TD` is before the norm."""
        mlp = self._mlp
        assert mlp is not None, "only attention and recurrences stand alone"
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
            heads=None if attention is None else attention.heads,
            recurrence=None if self._recurrent is None else self._recurrent.parts,
            products=(
                *(() if attention is None else (attention.qkv, attention.o)),
                *(mlp.products if isinstance(mlp, MLP) else ()),
            ),
            experts=mlp.parts() if isinstance(mlp, Mixture) else None,
            rope=self.rope,
            parallel=config.parallel_block,
            activation=config.activation.value,
            gated=config.gated_mlp,
            clip=config.qkv_clip,
            scale=config.residual_scale,
            per_layer=None if self._per_layer is None else self._per_layer.parts,
            factor=self._factor,
        )


def add_norm(x_TD: Tensor, y_TD: Tensor | None, norm: RowNorm | None) -> Tensor:
    """x += y in place, if there is a y; then the norm of x, or x itself without a norm."""
    if norm is not None:
        return norm(x_TD, y_TD)
    if y_TD is not None:
        x_TD += y_TD
    return x_TD
