"""Gemma 4's mixtures: a layer has an MLP and a mixture of experts beside it, and both have their norms.

    x += after(after_mlp(mlp(before(x))) + after_experts(experts(before_experts(x))))

The router reads x with a third norm, and a chosen expert's weight has a learned factor. Layers run op by op.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specinfer.kernels.low_rank import AdaptedLayer
from specinfer.kernels.ops import NormParts
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.experts import EXPERT_FACTORS, ROUTER_NORM, mixture
from specinfer.models.layers import RowNorm
from specinfer.models.weight_memory import Weights


class MixtureLayer(DecoderLayer):
    """A layer with an MLP and a mixture."""

    __slots__ = ("_after", "_before", "_experts", "_factors_E", "_router_norm", "_scale")

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__(layer, replace(config, experts=None), weights, prefix)
        assert config.experts is not None, "another decoder has no mixtures"
        names = "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
        self._after = [RowNorm.of(f"{prefix}.{name}", config, weights) for name in names]
        self._before = RowNorm.of(f"{prefix}.pre_feedforward_layernorm_2", config, weights)
        of_router = NormParts(weights.tensor(f"{prefix}.{ROUTER_NORM}"), config.norm_eps)
        self._router_norm = RowNorm(of_router, weights.kernels.ops)
        self._factors_E = weights.exact(f"{prefix}.{EXPERT_FACTORS}")
        self._scale = config.hidden_size**-0.5  # of the router's logits
        self._experts = mixture(config, config.experts, weights, f"{prefix}.mlp")

    def _mlp_output(self, input_TD: Tensor, adapted: AdaptedLayer | None, x_TD: Tensor) -> Tensor:
        made_TD = self._after[0](super()._mlp_output(input_TD, adapted, x_TD))
        logits_TE = self._experts.router(self._router_norm(x_TD).float()) * self._scale
        made_TD += self._after[1](self._experts.of_routed(self._before(x_TD), logits_TE, self._factors_E))
        return made_TD


class MixtureDecoder(Decoder):
    """A decoder of such layers."""

    def _layer(self, layer: int, weights: Weights, prefix: str) -> DecoderLayer:
        return MixtureLayer(layer, self.config, weights, prefix)
