"""Medusa's heads as the engine runs them: products with one hidden state of each text.

heads/medusa.py says what they compute. Shapes: B texts, L levels, D the target's hidden size, U tokens the
heads can name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.heads.config import MedusaConfig
from specinfer.models.language_model import LanguageModel, Residual
from specinfer.models.weight_memory import Weights


class MedusaModel:
    """The heads over products of the kernels; they have no keys and values, so nothing of them is cached."""

    def __init__(
        self, head: MedusaConfig, weights: Weights, target: LanguageModel, ids: Sequence[int]
    ) -> None:
        """`target` has the norm behind which hidden states are read; the heads can name the tokens `ids`."""
        self.head = head
        self.config = target.config  # whose sizes they have
        self.ids = ids
        self.dtype = weights.dtype
        self.device = weights.device
        self.kernels = weights.kernels
        self._target = target
        self._blocks = [
            [
                weights.linear(f"blocks.{level}.layers.{layer}", bias=head.bias)
                for layer in range(head.num_layers)
            ]
            for level in range(head.depth)
        ]
        self._heads = [weights.linear(f"lm_heads.{level}") for level in range(head.output_layers)]

    def run(self, states_BD: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        """What the output layers read of the first `levels`, [B, L, D], and their logits, [B, L, U].

        `states_BD` is what the target's last layer put out.
        """
        h_BD = self._target.final_norm(Residual(states_BD))
        read: list[Tensor] = []
        for block in self._blocks[:levels]:
            x_BD = h_BD
            for layer in block:
                x_BD = x_BD + F.silu(layer(x_BD))
            read.append(x_BD)
        logits = [self._heads[0 if self.head.shared_head else level](x_BD) for level, x_BD in enumerate(read)]
        return torch.stack(read, dim=1), torch.stack(logits, dim=1)
