"""A mixture of experts: each row uses a few of many MLPs, chosen by a router.

Shapes: T rows of a step, D hidden size, E experts, K experts of a row.

    logits   router(x), in float32; the K largest are chosen, the lower number first if equal
    weights  their softmax over all experts, or over the K (Experts.normalized); or sigmoids (Experts.sigmoid)
    result   the sum of weight * expert(x), and of sigmoid(gate) * shared expert(x) if there is one;
             or of expert(weight * x) (Experts.scales_inputs)

Rows are grouped by expert, so that one product computes all rows of an expert. A row's sum is added in
float32 in ascending order of experts and rounded once, independent of other rows. cpu/experts.cpp computes
the same, except for inputs times weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.layer_parts import ExpertParts
from specinfer.kernels.ops import Ops, SigmoidScores
from specinfer.models.config import Experts, ModelConfig
from specinfer.models.layers import MLP
from specinfer.models.ranges import InnerRange
from specinfer.models.weight_memory import Weights, first_matrices

ROUTER_NORM, EXPERT_FACTORS = "mlp.router_scale", "mlp.expert_scale"  # of mixtures beside an MLP
EXPERTS: Final = ".mlp.experts."  # in the names of all matrices of routed experts


@dataclass(frozen=True, slots=True)
class Mixture:
    """The MLPs of a layer, and the router that chooses among them."""

    config: Experts
    parts: ExpertParts  # for a native call
    each: Sequence[MLP]
    shared: MLP | None
    ops: Ops
    # Called with the chosen experts before the first of them computes; None: all are in memory.
    want: Callable[[Sequence[int]], None] | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.of_routed(x_TD, self.parts.router(x_TD.float()))

    def of_routed(self, x_TD: Tensor, logits_TC: Tensor, factors_E: Tensor | None = None) -> Tensor:
        """The same with given logits of the router, and factors of the experts' weights."""
        config, ops = self.config, self.ops
        numbers_TK, weights_TK = ops.choose_experts(
            logits_TC, config.count, config.per_token, normalized=config.normalized, scores=self.parts.scores
        )
        if factors_E is not None:
            weights_TK = weights_TK * factors_E[numbers_TK]
        total_TD = torch.zeros(x_TD.shape, device=x_TD.device)
        chosen = sorted({*numbers_TK.flatten().tolist()})
        if self.want is not None:
            self.want(chosen)
        for number in chosen:
            rows_R, places_R = (numbers_TK == number).nonzero(as_tuple=True)
            given_RD, weights_R = x_TD[rows_R], weights_TK[rows_R, places_R]
            if config.scales_inputs:
                given_RD = (given_RD.float() * weights_R[:, None]).to(x_TD.dtype)
                weights_R = torch.ones_like(weights_R)
            ops.add_weighted(total_TD, self.each[number](given_RD), rows_R.contiguous(), weights_R)
        if self.shared is not None:
            all_T = torch.arange(len(x_TD), device=x_TD.device)
            open_T = (
                ops.open_gates(logits_TC, config.count)
                if config.shared_gated
                else total_TD.new_ones(len(x_TD))
            )
            ops.add_weighted(total_TD, self.shared(x_TD), all_T, open_T)
        return total_TD.to(x_TD.dtype)


def mixture(config: ModelConfig, experts: Experts, weights: Weights, prefix: str) -> Mixture:
    """The mixture whose tensors' names begin with `prefix`, or a rank's part of it."""
    part, ops = config.part, weights.kernels.ops

    def mlps(names: Sequence[str], own: InnerRange, *, bias: bool = False) -> list[MLP]:
        gated, full = experts.gated, [f"{prefix}.{name}" for name in names]
        found = weights.gated(full, own.columns, own.sums, bias=bias, gated=gated)
        return [MLP(*both, config.activation, ops, gated=gated) for both in found]

    gates = ["gate", "shared_expert_gate"] if experts.shared_size and experts.shared_gated else ["gate"]
    router = weights.linear(*(f"{prefix}.{name}" for name in gates), bias=experts.bias, precise=True)
    scores: SigmoidScores | None = None
    if experts.sigmoid:
        choice_E = weights.exact(f"{prefix}.gate.choice_bias") if experts.choice_bias else None
        scores = SigmoidScores(choice_E, experts.scale, experts.epsilon)
    # Before the experts, as a prepared file has all other matrices of a layer in one piece.
    shared = mlps(["shared_expert"], part.shared_expert)[0] if experts.shared_size else None
    each = mlps([f"experts.{number}" for number in range(experts.count)], part.experts, bias=experts.bias)
    prefetch = weights.expert_prefetch(f"{prefix}.experts.0")
    parts = ExpertParts(
        router=router,
        each=[mlp.products for mlp in each],
        shared=None if shared is None else shared.products,
        per_token=experts.per_token,
        normalized=experts.normalized,
        shared_gated=experts.shared_gated,
        gated=experts.gated,
        scores=scores,
    )
    return Mixture(experts, parts, each, shared, ops, prefetch)


def expert_matrices(experts: Experts, hidden: int) -> list[tuple[str, int, int, bool]]:
    """The matrices of a mixture: the decoder's name, rows, columns, and True if there is a bias."""
    found = [("mlp.gate", experts.count, hidden, experts.bias)]
    mlps = [(f"mlp.experts.{number}", experts.size, experts.bias) for number in range(experts.count)]
    if experts.shared_size:
        if experts.shared_gated:
            found.append(("mlp.shared_expert_gate", 1, hidden, False))
        mlps.append(("mlp.shared_expert", experts.shared_size, False))
    for name, size, bias in mlps:
        found += mlp_matrices(name, size, hidden, gated=experts.gated, bias=bias)
    return found


def mlp_matrices(
    name: str, size: int, hidden: int, *, gated: bool, bias: bool
) -> list[tuple[str, int, int, bool]]:
    """The matrices of one MLP of that size, in the same form."""
    firsts = [(first, size, hidden, bias) for first in first_matrices(name, gated=gated)]
    return [*firsts, (f"{name}.down_proj", hidden, size, bias)]
