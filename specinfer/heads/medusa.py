"""Medusa's heads in plain PyTorch: the oracle of what the engine runs.

Shapes: L levels, D the target's hidden size, U tokens the heads can name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.heads.config import MedusaConfig


class ResidualLayers(nn.Module):
    """The layers of one head, each x + silu(W x + b)."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.bias) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """All heads of a checkpoint as a module whose tensors have vLLM's names."""

    def __init__(self, config: MedusaConfig, ids: Sequence[int]) -> None:
        """`ids` are the tokens the heads can name, ascending."""
        super().__init__()
        self.config = config
        self.ids = torch.tensor(ids)
        self.blocks = nn.ModuleList(ResidualLayers(config) for _ in range(config.depth))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            for _ in range(config.output_layers)
        )

    def forward(self, h: Tensor) -> Tensor:
        """The logits of every level, [..., L, U], of what the target's last norm puts out, [..., D].

        Of token t's level i guesses token t + 2 + i: the target itself says token t + 1.
        """
        levels = [
            self.lm_heads[0 if self.config.shared_head else level](block(h))
            for level, block in enumerate(self.blocks)
        ]
        return torch.stack(levels, dim=-2)
