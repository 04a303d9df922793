"""Layers of heads as PyTorch modules, for training and as the reference for the engine's passes.

Their tensors have the names of checkpoints. They take batches, in float32 unless moved. Inside an autocast
context the outputs of linear layers, and so an MLP's activation and gated product, are rounded; norms, rotary
embeddings, softmax and the residual stream keep their precision.

Shapes: B sequences, T rows, A anchors, R rows of a block, X = T + R. N query heads, K key-value heads,
G = N / K, H head size, D hidden size.
"""

import torch
from torch import Tensor, nn

from specinfer.kernels.ops import torch_activation
from specinfer.models.config import ModelConfig, QkNorm
from specinfer.models.layers import RotaryEmbedding
from specinfer.models.positions import Rope

Rotation = tuple[Tensor, Tensor]  # cos and sin of every row's angles, [..., 1, H / 2]


class TokenTable(nn.Embedding):
    """Embeddings that draw no first values on the meta device.

    To draw normal values there, PyTorch imports its compiler, which takes a start 2 s.
    """

    def reset_parameters(self) -> None:
        """Draw first values, unless the table has no memory."""
        if not self.weight.is_meta:
            super().reset_parameters()


class HeadNorm(nn.RMSNorm):
    """An RMSNorm that is computed in the dtype of its weight, also inside an autocast context."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = super().forward(x.to(self.weight.dtype))
        return out


class SelfAttention(nn.Module):
    """The q, k, v and o projections and the rotary embedding; input rows have `width` numbers."""

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
    """The parts of a decoder layer except attention, which each head computes itself."""

    def __init__(self, body: ModelConfig, *, reads_token: bool = False) -> None:
        """`reads_token`: q, k and v project a token's normed embedding concatenated with the hidden state."""
        super().__init__()
        size = body.hidden_size
        self.input_layernorm = HeadNorm(size, body.norm_eps)
        if reads_token:
            self.hidden_norm = HeadNorm(size, body.norm_eps)
        self.self_attn = SelfAttention(body, 2 * size if reads_token else size)
        self.post_attention_layernorm = HeadNorm(size, body.norm_eps)
        self.mlp = HeadMLP(body)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output [..., K, G, H] and the MLP's output to the residual stream [..., D]."""
        x = x + self.self_attn.o_proj(attended.flatten(-3))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def rotation_at(positions: Tensor, rope: Rope, head_dim: int) -> Rotation:
    """Return the rotations for positions of any shape."""
    made = RotaryEmbedding(rope, head_dim, positions.device).at(positions[..., None])
    return made.cos, made.sin


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary embeddings to heads [..., K, H]; elements i and i + H / 2 form a pair.

    The result is float32 if x is narrower, like the angles.
    """
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, in float32 if the scores are narrower."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def block_attended(
    q_BARKGH: Tensor, of_text: tuple[Tensor, Tensor], of_block: tuple[Tensor, Tensor], hidden_BARX: Tensor
) -> Tensor:
    """Return the attention output of the blocks' rows, [B, A, R, K, G, H].

    Keys and values are [B, T, K, H] for texts and [B, A, R, K, H] for blocks.
    """
    scores = torch.cat(
        (
            torch.einsum("barkgh,btkh->barkgt", q_BARKGH, of_text[0]),
            torch.einsum("barkgh,baskh->barkgs", q_BARKGH, of_block[0]),
        ),
        dim=-1,
    )
    weights = softmax(scores.masked_fill(hidden_BARX[:, :, :, None, None], float("-inf")))
    text, block = torch.split(weights, [of_text[0].shape[1], of_block[0].shape[2]], dim=-1)
    return torch.einsum("barkgt,btkh->barkgh", text, of_text[1]) + torch.einsum(
        "barkgs,baskh->barkgh", block, of_block[1]
    )


def initialise(module: nn.Module, generator: torch.Generator, spread: float = 0.02) -> None:
    """Draw trained matrices from a normal distribution with deviation `spread`; set their biases to 0."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
