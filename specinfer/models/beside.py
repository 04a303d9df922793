"""Beside: Gemma 4's mixture of experts beside a layer's MLP; both have their norms.

    x += after(after_mlp(mlp(before(x))) + after_experts(experts(before_experts(x))))

The router reads x with a third norm, and a chosen expert's weight has a learned factor. Layers run op by op.
"""

from torch import Tensor

from specinfer.kernels.ops import NormParts
from specinfer.models.config import Experts, ModelConfig
from specinfer.models.experts import EXPERT_FACTORS, ROUTER_NORM, mixture
from specinfer.models.layers import RowNorm
from specinfer.models.weight_memory import Weights


class Beside:
    """The mixture of a layer, with the norms of both."""

    def __init__(self, config: ModelConfig, experts: Experts, weights: Weights, prefix: str) -> None:
        """Tensor names start with the layer's `prefix`."""
        names = "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
        self._after = [RowNorm.of(f"{prefix}.{name}", config, weights) for name in names]
        self._before = RowNorm.of(f"{prefix}.pre_feedforward_layernorm_2", config, weights)
        of_router = NormParts(weights.tensor(f"{prefix}.{ROUTER_NORM}"), config.norm_eps)
        self._router_norm = RowNorm(of_router, weights.kernels.ops)
        self._factors_E = weights.exact(f"{prefix}.{EXPERT_FACTORS}")
        self._scale = config.hidden_size**-0.5  # of the router's logits
        self._experts = mixture(config, experts, weights, f"{prefix}.mlp")

    def __call__(self, made_TD: Tensor, x_TD: Tensor) -> Tensor:
        """The output of both, [T, D], for that of the MLP, and x before its norm."""
        made_TD = self._after[0](made_TD)
        logits_TE = self._experts.parts.router(self._router_norm(x_TD).float()) * self._scale
        made_TD += self._after[1](self._experts.of_routed(self._before(x_TD), logits_TE, self._factors_E))
        return made_TD
