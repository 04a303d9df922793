"""The layers of heads in plain PyTorch, for training and as oracles of what the engine runs.

They are modules, so that autograd sees through them and their tensors have a checkpoint's names; batched, in
float32 unless moved. Within an autocast what products put out is rounded, and with it an MLP's activation and
the gate times what it lets through; norms, rotations, softmaxes, and the residual stream stay as exact as
they are.

Shapes: B sequences, T rows, N query heads, K key-value heads, G = N / K, H head size, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specinfer.kernels.ops import torch_activation
from specinfer.models.config import ModelConfig, QkNorm
from specinfer.models.positions import Rope
from specinfer.models.rope import RotaryEmbedding

Rotation = tuple[Tensor, Tensor]  # cos and sin of every row's angles, [..., 1, H / 2]


class HeadNorm(nn.RMSNorm):
    """An RMS norm that is computed in float32, whatever the products before it were."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = super().forward(x.to(self.weight.dtype))
        return out


class SelfAttention(nn.Module):
    """The products around attention, with a rotation between: of rows `width` wide."""

    def __init__(self, body: ModelConfig, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, body.num_heads * body.head_dim, bias=body.qkv_bias)
        self.k_proj = nn.Linear(width, body.num_kv_heads * body.head_dim, bias=body.qkv_bias)
        self.v_proj = nn.Linear(width, body.num_kv_heads * body.head_dim, bias=body.qkv_bias)
        self.o_proj = nn.Linear(body.num_heads * body.head_dim, body.hidden_size, bias=body.o_bias)
        if body.qk_norm is QkNorm.HEAD:
            self.q_norm = HeadNorm(body.head_dim, body.norm_eps)
            self.k_norm = HeadNorm(body.head_dim, body.norm_eps)
        self._heads = (body.num_kv_heads, body.num_heads // body.num_kv_heads, body.head_dim)
        self._scale = body.attention_scale

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., width] -> [..., K, G, H], scaled."""
        q = self.q_proj(x).unflatten(-1, (-1, self._heads[2]))
        q = rotated(self.q_norm(q) if hasattr(self, "q_norm") else q, rotation)
        kv_heads, group, head = self._heads
        return self._scale * q.reshape(*q.shape[:-2], kv_heads, group, head)

    def keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., width] -> [..., K, H]."""
        k = self.k_proj(x).unflatten(-1, (-1, self._heads[2]))
        return rotated(self.k_norm(k) if hasattr(self, "k_norm") else k, rotation)

    def values(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., K, H]."""
        v: Tensor = self.v_proj(x).unflatten(-1, (-1, self._heads[2]))
        return v


class HeadMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, body: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(body.hidden_size, body.intermediate_size, bias=body.mlp_bias)
        self.up_proj = nn.Linear(body.hidden_size, body.intermediate_size, bias=body.mlp_bias)
        self.down_proj = nn.Linear(body.intermediate_size, body.hidden_size, bias=body.mlp_bias)
        self._act = torch_activation(body.activation.value)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    """A decoder layer's parts; who attends to what is its owner's business."""

    def __init__(self, body: ModelConfig, *, reads_token: bool = False, input_norm: bool = True) -> None:
        """`reads_token`: q, k and v are products with a token's normed embedding and the hidden state."""
        super().__init__()
        size = body.hidden_size
        if input_norm:
            self.input_layernorm = HeadNorm(size, body.norm_eps)
        if reads_token:
            self.hidden_norm = HeadNorm(size, body.norm_eps)
        self.self_attn = SelfAttention(body, 2 * size if reads_token else size)
        self.post_attention_layernorm = HeadNorm(size, body.norm_eps)
        self.mlp = HeadMLP(body)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream [..., D] with what was attended to, [..., K, G, H], and the MLP's output."""
        x = x + self.self_attn.o_proj(attended.flatten(-3))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def rotation_at(positions: Tensor, rope: Rope, head_dim: int) -> Rotation:
    """The rotation of rows at these positions, any shape."""
    made = RotaryEmbedding(rope, head_dim, positions.device).at(positions[..., None])
    return made.cos, made.sin


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """The heads [..., K, H] of rows, rotated: the pair (a, b) at distance H / 2 as a complex number.

    In float32, as the angles are, where x is narrower.
    """
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis; in float32 where the scores are narrower."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def initialise(module: nn.Module, generator: torch.Generator, spread: float = 0.02) -> None:
    """Draw the matrices that are trained from a normal law of deviation `spread`; their biases become 0."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
