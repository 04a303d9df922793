"""A mixture of experts computed by its definition, one row and one expert at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.models.config import Experts


def chosen_experts(logits: Sequence[float], config: Experts) -> dict[int, float]:
    """Return the experts of a row and their weights, by ascending number."""
    order = sorted(range(config.count), key=lambda number: (-logits[number], number))
    chosen = sorted(order[: config.per_token])
    among = chosen if config.normalized else range(config.count)
    total = math.fsum(math.exp(logits[number] - max(logits)) for number in among)
    return {number: math.exp(logits[number] - max(logits)) / total for number in chosen}


def mixture_row(x_D: Tensor, tensors: Mapping[str, Tensor], prefix: str, config: Experts) -> Tensor:
    """Return a mixture's output for one row, [D]; `tensors` have the decoder's names, beginning with
    `prefix`.
    """

    def times(name: str, row: Tensor) -> Tensor:
        bias = tensors.get(f"{prefix}.{name}.bias", torch.zeros(()))
        return tensors[f"{prefix}.{name}.weight"].double() @ row + bias.double()

    def mlp(name: str) -> Tensor:
        gate, up = times(f"{name}.gate_proj", x_D), times(f"{name}.up_proj", x_D)
        return times(f"{name}.down_proj", F.silu(gate) * up)

    x_D = x_D.double()
    result = torch.zeros_like(x_D)
    for number, weight in chosen_experts(times("gate", x_D).tolist(), config).items():
        result += weight * mlp(f"experts.{number}")
    if config.shared_size:
        result += torch.sigmoid(times("shared_expert_gate", x_D)) * mlp("shared_expert")
    return result
