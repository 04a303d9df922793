"""A mixture of experts: each row uses a few of many MLPs, chosen by a router.

Shapes: T rows of a step, D hidden size, E experts, K experts of a row.

    logits   router(x), in float32; the K largest are chosen, the lower number first if equal
    weights  their softmax over all experts, or over the K (Experts.normalized)
    result   the sum of weight * expert(x), and of sigmoid(gate) * shared expert(x) if there is one

Rows are grouped by expert, so that one product computes all rows of an expert. A row's sum is added in
float32 in ascending order of experts and rounded once, independent of other rows. cpu/experts.cpp computes
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.decoder import ExpertParts
from specinfer.kernels.ops import Ops
from specinfer.kernels.product import Product
from specinfer.models.config import Experts, InnerRange, ModelConfig
from specinfer.models.layers import MLP
from specinfer.models.weight_memory import Weights

EXPERTS: Final = ".mlp.experts."  # in the names of all matrices of routed experts


@dataclass(frozen=True, slots=True)
class Mixture:
    """The MLPs of a layer, and the router that chooses among them."""

    config: Experts
    router: Product  # a logit for each expert, followed by the logit of the shared expert's gate
    each: Sequence[MLP]
    shared: MLP | None
    ops: Ops
    # Called with the chosen experts before the first of them computes; None: all are in memory.
    want: Callable[[Sequence[int]], None] | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        config, ops, logits_TC = self.config, self.ops, self.router(x_TD.float())
        numbers_TK, weights_TK = ops.choose_experts(
            logits_TC, config.count, config.per_token, normalized=config.normalized
        )
        total_TD = torch.zeros(x_TD.shape, device=x_TD.device)
        chosen = sorted({*numbers_TK.flatten().tolist()})
        if self.want is not None:
            self.want(chosen)
        for number in chosen:
            rows_R, places_R = (numbers_TK == number).nonzero(as_tuple=True)
            made_RD = self.each[number](x_TD[rows_R])
            ops.add_weighted(total_TD, made_RD, rows_R.contiguous(), weights_TK[rows_R, places_R])
        if self.shared is not None:
            all_T = torch.arange(len(x_TD), device=x_TD.device)
            ops.add_weighted(total_TD, self.shared(x_TD), all_T, ops.open_gates(logits_TC, config.count))
        return total_TD.to(x_TD.dtype)

    def parts(self) -> ExpertParts:
        """The products and settings for a native call."""
        return ExpertParts(
            router=self.router,
            each=[mlp.products for mlp in self.each],
            shared=None if self.shared is None else self.shared.products,
            per_token=self.config.per_token,
            normalized=self.config.normalized,
        )


def mixture(config: ModelConfig, experts: Experts, weights: Weights, prefix: str) -> Mixture:
    """The mixture whose tensors' names begin with `prefix`, or a rank's part of it."""
    part, ops = config.part, weights.kernels.ops

    def mlps(names: Sequence[str], own: InnerRange, *, bias: bool = False) -> list[MLP]:
        found = weights.gated([f"{prefix}.{name}" for name in names], own.columns, own.sums, bias=bias)
        return [MLP(*both, config.activation, ops, gated=True) for both in found]

    gates = ["gate", "shared_expert_gate"] if experts.shared_size else ["gate"]
    router = weights.linear(*(f"{prefix}.{name}" for name in gates), bias=experts.bias, precise=True)
    # Before the experts, as a prepared file has all other matrices of a layer in one piece.
    shared = mlps(["shared_expert"], part.shared_expert) if experts.shared_size else [None]
    each = mlps([f"experts.{number}" for number in range(experts.count)], part.experts, bias=experts.bias)
    return Mixture(experts, router, each, shared[0], ops, weights.expert_prefetch(f"{prefix}.experts.0"))


def expert_matrices(experts: Experts, hidden: int) -> list[tuple[str, int, int, bool]]:
    """The matrices of a mixture: the decoder's name, rows, columns, and True if there is a bias."""
    found = [("mlp.gate", experts.count, hidden, experts.bias)]
    mlps = [(f"mlp.experts.{number}", experts.size, experts.bias) for number in range(experts.count)]
    if experts.shared_size:
        found.append(("mlp.shared_expert_gate", 1, hidden, False))
        mlps.append(("mlp.shared_expert", experts.shared_size, False))
    for name, size, bias in mlps:
        found += [(f"{name}.{first}_proj", size, hidden, bias) for first in ("gate", "up")]
        found.append((f"{name}.down_proj", hidden, size, bias))
    return found
